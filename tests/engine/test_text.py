"""Stop strings and released text, against the plain rule: cut before the first stop that any token completes."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.engine.text import TextStream
from tests.engine.tiny import ByteDetokenizer


def run(data: bytes, stop: list[str], may_stop_from: int = 0) -> tuple[str, str | None, list[str]]:
    stream, pieces = TextStream(ByteDetokenizer(), stop), []
    for index, byte in enumerate(data):
        stream.push(byte, may_stop=index >= may_stop_from)
        if stream.stopped_by is not None:
            break
        pieces.append(stream.take())
    pieces.append(stream.finish())
    return stream.text, stream.stopped_by, pieces


@given(text=st.text(alphabet="ab", max_size=30), stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_completed_stop(text: str, stop: list[str]) -> None:
    got, stopped_by, pieces = run(text.encode(), stop)
    ends = [(text.find(entry) + len(entry), text.find(entry)) for entry in stop if entry in text]
    if ends:
        first_end = min(end for end, _ in ends)
        assert got == text[: min(at for end, at in ends if end == first_end)]
        assert stopped_by in stop and text[len(got) :].startswith(str(stopped_by))
    else:
        assert (got, stopped_by) == (text, None)
    assert "".join(pieces) == got


@given(text=st.text(max_size=20), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_pieces_join_to_the_text_for_any_unicode(text: str, stop: list[str]) -> None:
    data = text.encode(errors="replace")
    got, _, pieces = run(data, stop)
    assert "".join(pieces) == got and data.decode().startswith(got)


def test_only_what_could_become_a_stop_is_held_back() -> None:
    stream, pieces = TextStream(ByteDetokenizer(), ["END"]), []
    for byte in b"xEyENzEND":
        stream.push(byte)
        pieces.append(stream.take() if stream.stopped_by is None else stream.finish())
    assert pieces == ["x", "", "Ey", "", "", "ENz", "", "", ""]
    assert (stream.text, stream.stopped_by) == ("xEyENz", "END")


def test_a_stop_completed_before_min_tokens_does_not_count() -> None:
    assert run(b"abcabd", ["ab"], may_stop_from=3)[:2] == ("abc", "ab")
    assert run(b"abc", ["ab"], may_stop_from=3)[:2] == ("abc", None)


def test_an_incomplete_character_is_released_at_the_end() -> None:
    text, _, pieces = run("é".encode()[:1], [])
    assert text == "�" and pieces == ["", "�"]
