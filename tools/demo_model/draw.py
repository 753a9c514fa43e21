"""What a problem is made of: seeded draws of names, words and quantities, and equations that compute and spell themselves."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MAX_VALUE = 99_999

SHE = [
    "Ada",
    "Alice",
    "Amira",
    "Anna",
    "Bella",
    "Bianca",
    "Carla",
    "Carmen",
    "Chloe",
    "Clara",
    "Daisy",
    "Dana",
    "Diana",
    "Elena",
    "Ella",
    "Emily",
    "Emma",
    "Eva",
    "Fatima",
    "Fiona",
    "Grace",
    "Greta",
    "Hana",
    "Hannah",
    "Helen",
    "Ida",
    "Irene",
    "Iris",
    "Isla",
    "Jade",
    "Jane",
    "Julia",
    "Kate",
    "Kira",
    "Laila",
    "Lara",
    "Laura",
    "Leah",
    "Lena",
    "Lily",
    "Lisa",
    "Lucy",
    "Maria",
    "Maya",
    "Megan",
    "Mei",
    "Mia",
    "Mila",
    "Mina",
    "Molly",
    "Nadia",
    "Nina",
    "Nora",
    "Olga",
    "Olivia",
    "Paula",
    "Petra",
    "Priya",
    "Rachel",
    "Rosa",
    "Ruby",
    "Ruth",
    "Sara",
    "Sofia",
    "Stella",
    "Tara",
    "Tessa",
    "Tina",
    "Vera",
    "Wendy",
    "Yuki",
    "Zara",
    "Zoe",
]
HE = [
    "Aaron",
    "Adam",
    "Ahmed",
    "Alan",
    "Albert",
    "Alex",
    "Anton",
    "Arjun",
    "Ben",
    "Bruno",
    "Carl",
    "Carlos",
    "Chris",
    "Daniel",
    "David",
    "Dennis",
    "Diego",
    "Eli",
    "Emil",
    "Eric",
    "Ethan",
    "Felix",
    "Finn",
    "Frank",
    "Fred",
    "George",
    "Hassan",
    "Henry",
    "Hugo",
    "Ian",
    "Ivan",
    "Jack",
    "Jacob",
    "James",
    "Jamal",
    "Jason",
    "Joel",
    "John",
    "Jonas",
    "Jose",
    "Karl",
    "Kenji",
    "Kevin",
    "Lars",
    "Leo",
    "Liam",
    "Louis",
    "Lucas",
    "Luis",
    "Marco",
    "Mark",
    "Martin",
    "Matt",
    "Max",
    "Miguel",
    "Mike",
    "Nathan",
    "Nico",
    "Noah",
    "Oliver",
    "Omar",
    "Oscar",
    "Otto",
    "Paul",
    "Pedro",
    "Peter",
    "Ravi",
    "Ray",
    "Robert",
    "Sam",
    "Simon",
    "Steve",
    "Theo",
    "Thomas",
    "Tim",
    "Tom",
    "Victor",
    "Wei",
    "Will",
    "Yusuf",
]


class Retry(Exception):
    """The quantities drawn lead nowhere: a fraction, a negative, a number too large. The problem is drawn anew."""


@dataclass(frozen=True)
class Person:
    name: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


@dataclass(frozen=True)
class Equation:
    """`48 / 2 = <<48/2=24>>24`; with the format `$`, money: `48 / 2 = $<<48/2=24>>24`."""

    terms: str
    value: int
    is_tight: bool = False

    def __format__(self, spec: str) -> str:
        spaced = self.terms.replace("*", " * ").replace("+", " + ").replace("-", " - ").replace("/", " / ")
        left = f"{self.terms}=" if self.is_tight else f"{spaced} = "
        return f"{left}{spec}<<{self.terms}={self.value}>>{self.value}"


class Draw:
    """The draws of one problem. `quantities` grows by every number that the story gives; it decides to which side of the split the problem belongs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.quantities: list[int] = []
        self.is_tight = rng.random() < 0.25
        self._names: set[str] = set()

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A quantity of the story, `low` to `high`, both included."""
        value = low + step * int(self.rng.random() * ((high - low) // step + 1))
        self.quantities.append(value)
        return value

    def given(self, value: int) -> int:
        """A quantity of the story that follows from hidden draws."""
        self.quantities.append(value)
        return value

    def hidden(self, low: int, high: int) -> int:
        """A number that the story does not give."""
        return low + int(self.rng.random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(options, count)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def person(self) -> Person:
        while True:
            is_she = self.rng.random() < 0.5
            name = self.pick(SHE if is_she else HE)
            if name not in self._names:
                self._names.add(name)
                return Person(name, "she", "her", "her") if is_she else Person(name, "he", "him", "his")

    def people(self, count: int) -> list[Person]:
        return [self.person() for _ in range(count)]

    def add(self, *values: int) -> Equation:
        return self._equation("+", values, sum(values))

    def sub(self, first: int, *values: int) -> Equation:
        return self._equation("-", (first, *values), first - sum(values))

    def mul(self, *values: int) -> Equation:
        product = values[0]
        for value in values[1:]:
            if not _is_mental(product, value):
                raise Retry
            product *= value
        return self._equation("*", values, product)

    def div(self, first: int, by: int) -> Equation:
        if by < 1 or first % by or not _is_mental(by, first // by):
            raise Retry
        return self._equation("/", (first, by), first // by)

    def percent(self, of: int, share: int) -> Equation:
        if of * share % 100:
            raise Retry
        return self._checked(f"{of}*{share}/100", of * share // 100)

    def _equation(self, sign: str, values: Sequence[int], result: int) -> Equation:
        return self._checked(sign.join(map(str, values)), result)

    def _checked(self, terms: str, result: int) -> Equation:
        if not 0 < result <= MAX_VALUE:
            raise Retry
        return Equation(terms, result, self.is_tight)


def _is_mental(a: int, b: int) -> bool:
    """Whether a product is asked for in one go: two by two digits, three by one (or up to 12), four by one, zeros at the end aside."""
    low, high = sorted(int(str(x).rstrip("0") or 0) for x in (a, b))
    return high < 100 or (low <= 12 and high < 1000) or (low < 10 and high < 10_000)


@dataclass(frozen=True)
class Story:
    """What a template makes: the question, the worked lines, the answer."""

    question: str
    lines: tuple[str, ...]
    answer: int


def story(question: str, lines: Sequence[str], answer: Equation | int) -> Story:
    return Story(question, tuple(lines), answer if isinstance(answer, int) else answer.value)
