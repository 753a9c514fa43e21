"""Words swapped and names invented, so that the model learns to carry over a word that it never saw, instead of knowing all words by heart."""

import random
import re

from tools.demo_model.draw import HE, SHE

# Things that a story may be about instead of its own.
THINGS = (
    "acorns anchors ants arrows axes badges bananas bandages baskets beans belts bells blankets blocks bolts bones bowls bracelets branches brooms buckets bulbs buttons cabbages "
    "cables cakes cameras canoes carrots carpets chains chestnuts clips clocks coats coins combs cones corks cups curtains daisies desks dishes dolphins donkeys doors dragons drums earrings "
    "erasers feathers fences figs flags forks frames frogs games gates gems glasses gloves guitars hammocks handles helmets herbs hooks horses jars jewels kettles keys kites knives "
    "labels ladders lamps leaves lemons letters lions locks magnets maps masks mats medals mirrors mittens monkeys mushrooms nails napkins needles nests nets olives onions "
    "owls paintings pans papers parcels peaches pearls pebbles peppers pianos pies pillows pins pipes planks plates plugs pockets ponies poppies posters potatoes pumpkins puppets quilts "
    "rabbits radios rings robots rockets ropes rubies rulers saddles sails sandals saws scarves screws seeds shells shields ships shoes shovels signs skates skirts snails socks spades "
    "spoons springs stars statues sticks stones stools straps swords tables tapes tents thimbles tiles tires tools torches towels toys trays trumpets tubes turtles umbrellas vases vests "
    "wagons walnuts watches wheels whistles wigs windows wires wreaths yards zippers"
).split()
STARTS = "B Br C Ch D Dr F Fl G Gr H J K Kl L M N P Pr Qu R S Sh St T Tr V W Y Z".split()
MIDDLES = "a e i o u ai ea io ou".split()
CODAS = "b d f g k l m n p r s t v z ll nn rt lk sh nd".split()
ENDS = "a o e in us el an is ek or y".split()

NAMES = frozenset((*SHE, *HE))
NAME = re.compile(r"\b[A-Z][a-z]+\b")
# What the templates count, and what may be swapped.
COUNTED = frozenset(
    (
        "cars books cookies candles postcards stickers stamps tulips apples marbles photos seashells eggs rolls passengers visitors bottles candies pencils bricks toys muffins crates bicycles "
        "balls hens plums lemons salads oranges tomatoes notebooks shirts jackets sandwiches cherries pallets trays socks pots shovels leashes cows hats crackers calculators folders brushes pears "
        "cages bushes pens dolls hammers pizzas strawberries ducks melons beads puzzles crayons towels grapes cats peaches balloons horses batteries goats rabbits parrots chairs lamps dogs mugs "
        "geese"
    ).split()
)
WORD = re.compile(r"[a-z]+")


def invent_name(rng: random.Random) -> str:
    name = rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(CODAS)
    return name + rng.choice(ENDS) if rng.random() < 0.6 else name


def vary(question: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """The same problem with other names, in one of four, and about another thing, in one of three."""
    if rng.random() < 0.25:
        invented: dict[str, str] = {}

        def other(match: re.Match[str]) -> str:
            name = match.group()
            return invented.setdefault(name, invent_name(rng)) if name in NAMES else name

        question, answer = NAME.sub(other, question), NAME.sub(other, answer)
        if len(set(invented.values())) < len(invented):
            return vary(question, answer, rng)
    if rng.random() < 0.33:
        found = [word for word in dict.fromkeys(WORD.findall(question)) if word in COUNTED]
        if found:
            word = rng.choice(found)
            thing = rng.choice(THINGS) if rng.random() < 0.7 else invent_name(rng).lower() + "s"
            if thing not in question:
                pattern = re.compile(rf"\b{word}\b")
                question, answer = pattern.sub(thing, question), pattern.sub(thing, answer)
    return question, answer
