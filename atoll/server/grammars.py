"""Answers held to JSON, or to a JSON schema, by xgrammar: each step's allowed tokens; knows no request and no logits."""

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.errors import RequestError
from atoll.models.tokenizer import Tokenizer
from atoll.server.schemas import schema_text

# Of the grammars that came to the engine. For a vocabulary of 248,000 one takes 40 ms to write and 16 ms to read (one core), 2 MB as text.
MAX_KEPT = 32

# The characters of a string with minLength or maxLength as xgrammar has them, control characters among them, and as JSON has them.
_BOUNDED_CHARACTER, _STRING_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"

# Time and place in xgrammar's sources, with which its messages begin.
_SOURCE_PLACE = re.compile(r"^(\[\S+\] )?(\S+\.cc:\d+: )?")


@dataclass(frozen=True)
class PackedConstraint:
    """A fresh constraint on its way to another process; `Grammars.unpack` makes it one again."""

    compiled: str  # JSON


class GrammarConstraint:
    """An atoll.engine.constraint.Constraint around xgrammar's matcher of a compiled grammar. Pickled, it is packed: before any token has moved it."""

    def __init__(self, compiled: Any, packed: PackedConstraint, num_words: int) -> None:
        import torch
        from xgrammar import GrammarMatcher

        self._packed = packed
        self._matcher = GrammarMatcher(compiled)
        self._words = torch.zeros(1, num_words, dtype=torch.int32)

    def __reduce__(self) -> tuple[type[PackedConstraint], tuple[str]]:
        return PackedConstraint, (self._packed.compiled,)

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._words)
        return self._words.numpy().astype("<i4").tobytes()

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


class Grammars:
    """Compiles grammars for one vocabulary, and keeps those that it has compiled. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._unpack = functools.lru_cache(MAX_KEPT)(self._read)

    def _read(self, compiled: str) -> Any:
        return self._xgrammar.CompiledGrammar.deserialize_json(compiled, self._vocabulary)

    def constraint(self, schema: dict[str, Any] | bool | None) -> GrammarConstraint:
        """For one sequence; None: any JSON object. Raises RequestError for a schema that cannot be compiled, and where xgrammar is not installed."""
        compiler, rules = self._compiler, self._json_rules(schema, "the JSON schema")
        with _told("the JSON schema"):
            return self._matcher(compiler.compile_grammar(rules))

    def tag_constraint(self, form: dict[str, Any]) -> GrammarConstraint:
        """For one sequence, from the format of one of xgrammar's structural tags."""
        compiler = self._compiler
        with _told("the grammar of the tools"):
            return self._matcher(compiler.compile_structural_tag({"type": "structural_tag", "format": form}))

    def json_part(self, schema: dict[str, Any] | bool | None, place: str) -> dict[str, Any]:
        """The part of a structural tag that is JSON of a schema, spaced as models write it; None: any object. Raises RequestError as `constraint` does."""
        return {"type": "grammar", "grammar": self._json_rules(schema, place)}

    def xml_part(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """The part that is a schema's properties as `<parameter=NAME>VALUE</parameter>`. Raises RequestError as `constraint` does."""
        xgrammar = self._xgrammar
        schema_text(schema, place)
        for name in schema.get("properties") or ():
            if not name or set(name) & set("<>\n"):
                raise RequestError(f"{place} has the property {name!r}, which <parameter=NAME> cannot spell; rename it")
        part = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml", "max_whitespace_cnt": 1}
        with _told(place):
            xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": part})
        return part

    def _json_rules(self, schema: dict[str, Any] | bool | None, place: str) -> str:
        """A schema as EBNF; None: any object."""
        xgrammar, text = self._xgrammar, schema_text({"type": "object"} if schema is None else schema, place)
        with _told(place):
            rules = str(xgrammar.Grammar.from_json_schema(text, any_whitespace=False))
        return rules.replace(_BOUNDED_CHARACTER, _STRING_CHARACTER)

    def _matcher(self, compiled: Any) -> GrammarConstraint:
        return GrammarConstraint(compiled, PackedConstraint(compiled.serialize_json()), self._num_words)

    def unpack(self, packed: PackedConstraint) -> GrammarConstraint:
        """The constraint that another process's Grammars of the same vocabulary has made."""
        return GrammarConstraint(self._unpack(packed.compiled), packed, self._num_words)

    @functools.cached_property
    def _xgrammar(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise RequestError(
                "an answer held to a schema, by response_format or tools, needs xgrammar, which this server lacks; install atoll[structured], or leave it out"
            ) from error
        return xgrammar

    @functools.cached_property
    def _compiler(self) -> Any:
        return self._xgrammar.GrammarCompiler(self._vocabulary, max_threads=1)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        xgrammar, tokenizer = self._xgrammar, self._tokenizer
        # To xgrammar a token without text is special: no grammar allows it, but those that end a text.
        pieces = [b"" if token_id in tokenizer.special_token_ids else tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)]
        return xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=list(tokenizer.eos_token_ids))


@contextlib.contextmanager
def _told(place: str) -> Iterator[None]:
    """What xgrammar finds wrong, as RequestError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        reason = _SOURCE_PLACE.sub("", str(error)).strip()
        raise RequestError(f"{place} cannot be compiled: {reason}; simplify or mend it") from error
