"""Templates composed of operations: a quantity that changes, people compared, shopping, earning, making, travelling. Each is a world of words under one composer."""

from collections.abc import Callable, Mapping
from functools import partial

from tools.demo_model.draw import Draw, Equation, Retry, Story, story

Template = Callable[[Draw], Story]

# A quantity that changes. Start, gains, losses, the question. {p} the person, {h} the pronoun, {H} at a sentence's start, {q} a friend, {n} the number.
CHANGES: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "marbles": (
        "{p} has {n} marbles.",
        ["{H} wins {n} marbles at school.", "{q} gives {h_m} {n} more marbles.", "{H} buys a bag of {n} marbles."],
        ["{H} loses {n} marbles in a game.", "{H} gives {n} marbles to {q}.", "{n} marbles roll under the fridge and are lost."],
        ["How many marbles does {p} have now?", "How many marbles are left in the end?"],
    ),
    "library": (
        "A library has {n} books on its shelves.",
        ["It receives a donation of {n} books.", "Readers return {n} books.", "It buys {n} new books."],
        ["Readers borrow {n} books.", "{n} old books are thrown away.", "It sends {n} books to another branch."],
        ["How many books are on the shelves now?", "How many books does the library have in the end?"],
    ),
    "stickers": (
        "{p} starts the week with {n} stickers.",
        ["{H} gets {n} stickers from {q}.", "{H} finds {n} stickers in a magazine.", "{H} buys {n} more stickers."],
        ["{H} trades away {n} stickers.", "{H} puts {n} stickers on {h_s} notebook.", "{H} gives {q} {n} stickers."],
        ["How many stickers does {h} have at the end of the week?", "How many stickers does {p} have left?"],
    ),
    "bus": (
        "A train leaves the station with {n} passengers.",
        ["At the next stop, {n} people get on.", "Then {n} more passengers board.", "{n} tourists join at the following stop."],
        ["At the next stop, {n} people get off.", "Then {n} passengers leave the train.", "{n} people step out at the market."],
        ["How many passengers are on the train now?", "How many people are on the train after that?"],
    ),
    "farm eggs": (
        "{p} collects {n} eggs on {h_s} farm.",
        ["{H} finds {n} more eggs behind the barn.", "The next day the hens lay {n} eggs.", "A neighbor brings {h_m} {n} eggs."],
        ["{H} uses {n} eggs to bake cakes.", "{H} sells {n} eggs at the market.", "{n} eggs break on the way home."],
        ["How many eggs does {p} have left?", "How many eggs remain?"],
    ),
    "savings": (
        "{p} has ${n} in {h_s} savings account.",
        ["{H} deposits ${n}.", "{h_S} grandmother sends {h_m} ${n}.", "{H} earns ${n} by mowing lawns."],
        ["{H} withdraws ${n} for a gift.", "{H} spends ${n} on clothes.", "{H} pays a bill of ${n}."],
        ["How many dollars does {p} have now?", "How much money is in the account now?"],
    ),
    "water tank": (
        "A water tank holds {n} liters.",
        ["Rain adds {n} liters.", "The pump puts in another {n} liters.", "{p} pours {n} liters into it."],
        ["{p} uses {n} liters for the garden.", "The cows drink {n} liters.", "A leak drains {n} liters."],
        ["How many liters of water are in the tank now?", "How many liters are left?"],
    ),
    "bakery": (
        "In the morning, a bakery has {n} rolls.",
        ["The baker makes {n} more rolls.", "A second oven gives {n} rolls.", "{p} brings {n} rolls from the other shop."],
        ["Customers buy {n} rolls.", "A restaurant orders {n} rolls.", "{n} burnt rolls are thrown out."],
        ["How many rolls does the bakery have now?", "How many rolls are left?"],
    ),
    "museum": (
        "There are {n} visitors in a museum when it opens.",
        ["A school class of {n} children arrives.", "In the next hour {n} people come in.", "A tour group of {n} enters."],
        ["Before lunch {n} visitors leave.", "{n} people go home.", "Then {n} visitors walk out to the garden."],
        ["How many visitors are in the museum now?", "How many people are inside after this?"],
    ),
    "points": (
        "{p} has {n} points in a video game.",
        ["{H} finishes a level and gains {n} points.", "A bonus gives {h_m} {n} points.", "{H} finds a treasure worth {n} points."],
        ["{H} is hit and loses {n} points.", "{H} pays {n} points for a shield.", "A wrong move costs {h_m} {n} points."],
        ["How many points does {p} have now?", "What is {p}'s score in the end?"],
    ),
    "warehouse": (
        "A warehouse stores {n} boxes.",
        ["A truck delivers {n} boxes.", "On Tuesday {n} boxes arrive.", "Workers unload {n} more boxes."],
        ["{n} boxes are shipped to a store.", "Workers load {n} boxes onto a ship.", "{n} damaged boxes are removed."],
        ["How many boxes are in the warehouse now?", "How many boxes remain in the warehouse?"],
    ),
    "garden": (
        "{p} has {n} tulips in {h_s} garden.",
        ["{H} plants {n} more tulips.", "In spring {n} new tulips come up.", "{q} brings {h_m} {n} tulips."],
        ["{H} cuts {n} tulips for a vase.", "Rabbits eat {n} tulips.", "{H} gives {n} tulips to {q}."],
        ["How many tulips are in the garden now?", "How many tulips does {p} have now?"],
    ),
    "fish pond": (
        "There are {n} fish in a pond.",
        ["{p} puts {n} more fish into it.", "During the year {n} fish hatch.", "{n} fish swim in from the river."],
        ["{p} catches {n} fish.", "A heron eats {n} fish.", "{n} fish are moved to another pond."],
        ["How many fish are in the pond now?", "How many fish are there at last?"],
    ),
    "parking": (
        "{n} cars stand in a parking lot.",
        ["In the next hour {n} cars drive in.", "{n} more cars arrive for a concert.", "Then {n} cars enter."],
        ["{n} cars leave at noon.", "After the concert {n} cars drive away.", "{n} cars are towed."],
        ["How many cars are in the parking lot now?", "How many cars remain?"],
    ),
    "yarn": (
        "{p} owns {n} meters of ribbon.",
        ["{H} orders {n} meters more.", "{q} leaves {h_m} {n} meters of ribbon.", "At a sale {h} gets {n} meters of ribbon."],
        ["{H} uses {n} meters to wrap presents.", "{H} sews {n} meters onto a dress.", "{H} lends {q} {n} meters."],
        ["How many meters of ribbon does {p} have left?", "How much ribbon, in meters, is left?"],
    ),
    "cards": (
        "{p} collects football cards and has {n} of them.",
        ["For {h_s} birthday {h} gets {n} cards.", "{H} swaps a poster for {n} cards.", "{q} sends {h_m} {n} cards by mail."],
        ["{H} sells {n} cards online.", "{h_S} dog chews up {n} cards.", "{H} hands {n} cards to {h_s} cousin."],
        ["How many cards does {p} own now?", "How many football cards are in the collection now?"],
    ),
    "school": (
        "A school has {n} students.",
        ["In the new year {n} students join.", "{n} students move here from another town.", "A new class of {n} students starts."],
        ["{n} students graduate.", "{n} students change to another school.", "{n} students move away."],
        ["How many students does the school have now?", "How many students are there now?"],
    ),
    "apples": (
        "{p} picks {n} apples.",
        ["{q} adds {n} apples to the basket.", "{H} picks {n} more after lunch.", "{H} finds {n} apples on the ground."],
        ["{H} makes juice from {n} apples.", "{H} and {q} eat {n} apples.", "{n} apples turn out to be rotten."],
        ["How many apples are left?", "How many good apples does {p} have?"],
    ),
}

MULTIPLY = {2: "doubles", 3: "triples"}
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
LINE_ENDS = ["After that there are {e}.", "Now the number is {e}.", "That makes {e}.", "Then there are {e}.", "This gives {e}.", "So it is {e}."]


def change(world: str, d: Draw) -> Story:
    start, gains, losses, questions = CHANGES[world]
    p, q = d.people(2)
    words = {"p": p, "q": q, "h": p.he, "H": p.He, "h_m": p.him, "h_s": p.his, "h_S": p.His}
    is_money = "$" in start
    unit = "$" if is_money else ""
    thing = "amount" if is_money else "number"
    value = d.number(12, 99) if d.chance(0.5) else d.number(100, 990)
    sentences = [start.format(n=value, **words)]
    lines = []
    last = ""
    for _ in range(d.pick((2, 2, 3, 3, 4, 5))):
        kind = d.pick(("gain", "loss", "gain", "loss", "times", "part", "percent"))
        if kind == last and kind not in ("gain", "loss"):
            kind = "gain"
        last = kind
        if kind == "gain":
            n = d.number(2, 60) if value < 200 else d.number(10, 400)
            sentences.append(d.pick(gains).format(n=n, **words))
            e = d.add(value, n)
        elif kind == "loss":
            n = d.number(2, max(2, min(value - 2, 400)))
            sentences.append(d.pick(losses).format(n=n, **words))
            e = d.sub(value, n)
        elif kind == "times":
            n = d.number(2, 3)
            sentences.append(d.pick((f"Then the {thing} {MULTIPLY[n]}.", f"After a while the {thing} {MULTIPLY[n]}.", f"Soon there is {n} times as much.")))
            e = d.mul(value, n)
        elif kind == "part":
            n = d.pick([n for n in FRACTIONS if value % n == 0] or [0])
            if not n:
                raise Retry
            d.given(n)
            part = d.div(value, n)
            sentences.append(
                d.pick((f"Then {FRACTIONS[n]} of this is gone.", f"Later {FRACTIONS[n]} of it is taken away.", f"In the night {FRACTIONS[n]} of all is lost."))
            )
            lines.append(d.pick((f"The part that goes is {part:{unit}}.", f"{FRACTIONS[n].capitalize()} of {value} is {part:{unit}}.")))
            e = d.sub(value, part.value)
        else:
            n = d.pick([n for n in (10, 20, 25, 30, 40, 50, 60, 75) if value * n % 100 == 0] or [0])
            if not n:
                raise Retry
            d.given(n)
            part = d.percent(value, n)
            grows = d.chance(0.5)
            sentences.append(
                d.pick((f"Then it grows by {n}%.", f"The {thing} rises by {n}%."))
                if grows
                else d.pick((f"Then it shrinks by {n}%.", f"The {thing} falls by {n}%."))
            )
            lines.append(f"{n}% of {value} is {part:{unit}}.")
            e = d.add(value, part.value) if grows else d.sub(value, part.value)
        value = e.value
        lines.append(d.pick(LINE_ENDS).format(e=format(e, unit)))
    sentences.append(d.pick(questions).format(**words))
    return story(" ".join(sentences), lines, value)


# People compared: what they have, the verb, and how it is asked.
COMPARED: dict[str, tuple[str, str]] = {
    "seashells": ("seashells", "has"),
    "comic books": ("comic books", "owns"),
    "pages read": ("pages", "reads"),
    "kilometers": ("kilometers", "runs"),
    "cookies": ("cookies", "bakes"),
    "goals": ("goals", "scores"),
    "postcards": ("postcards", "sends"),
    "toy cars": ("toy cars", "has"),
    "candles": ("candles", "makes"),
    "stamps": ("stamps", "collects"),
    "push-ups": ("push-ups", "does"),
    "photos": ("photos", "takes"),
}
BASES = {"has": "have", "owns": "own", "reads": "read", "runs": "run", "bakes": "bake", "scores": "score", "sends": "send", "makes": "make"} | {
    "collects": "collect",
    "does": "do",
    "takes": "take",
}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def compare(world: str, d: Draw) -> Story:
    item, verb = COMPARED[world]
    base = BASES[verb]
    people = d.people(d.pick((2, 3, 3, 4)))
    values = [d.number(4, 60) if d.chance(0.7) else d.number(60, 300)]
    sentences = [f"{people[0]} {verb} {values[0]} {item}."]
    lines = []
    for i, p in enumerate(people[1:], 1):
        j = i - 1 if d.chance(0.75) else d.hidden(0, i - 1)
        other, value = people[j], values[j]
        kind = d.pick(("times", "more", "fewer", "part", "times more", "sum") if i > 1 else ("times", "more", "fewer", "part", "times more"))
        if kind == "times":
            n = d.number(2, 5)
            sentences.append(f"{p} {verb} {TIMES[n]} as many {item} as {other}.")
            e = d.mul(value, n)
        elif kind == "more":
            n = d.number(2, 80)
            sentences.append(d.pick((f"{p} {verb} {n} more {item} than {other}.", f"{p} {verb} {n} {item} more than {other} does.")))
            e = d.add(value, n)
        elif kind == "fewer":
            n = d.number(2, max(2, value - 2))
            sentences.append(f"{p} {verb} {n} fewer {item} than {other}.")
            e = d.sub(value, n)
        elif kind == "part":
            n = d.pick([n for n in FRACTIONS if value % n == 0] or [0])
            if not n:
                raise Retry
            d.given(n)
            sentences.append(f"{p} {verb} {FRACTIONS[n]} as many {item} as {other}.")
            e = d.div(value, n)
        elif kind == "times more":
            n, m = d.number(2, 4), d.number(2, 20)
            is_more = d.chance(0.5)
            sentences.append(f"{p} {verb} {m} {'more' if is_more else 'fewer'} than {TIMES[n]} as many {item} as {other}.")
            product = d.mul(value, n)
            lines.append(f"{TIMES[n].capitalize()} as many as {other} is {product}.")
            e = d.add(product.value, m) if is_more else d.sub(product.value, m)
        else:
            a, b = people[i - 2], people[i - 1]
            sentences.append(d.pick((f"{p} {verb} as many {item} as {a} and {b} together.", f"{p} {verb} as many as {a} and {b} combined.")))
            e = d.add(values[i - 2], values[i - 1])
        lines.append(f"{p} {verb} {e} {item}.")
        values.append(e.value)
    ending = d.pick(("all", "all", "last", "gap") if len(people) > 2 else ("all", "all", "gap"))
    if ending == "all":
        total = d.add(*values)
        who = "they" if len(people) > 2 else f"{people[0]} and {people[1]}"
        sentences.append(
            d.pick((f"How many {item} do {who} {base} altogether?", f"How many {item} do {who} {base} in total?", f"How many {item} is that in all?"))
        )
        lines.append(d.pick((f"Altogether that is {total} {item}.", f"In total they {base} {total} {item}.")))
        return story(" ".join(sentences), lines, total)
    if ending == "last":
        sentences.append(f"How many {item} does {people[-1]} {base}?")
        return story(" ".join(sentences), lines, values[-1])
    low, high = sorted((0, len(people) - 1), key=lambda i: values[i])
    gap = d.sub(values[high], values[low])
    sentences.append(f"How many more {item} does {people[high]} {base} than {people[low]}?")
    lines.append(f"{people[high]} {verb} {gap} {item} more than {people[low]}.")
    return story(" ".join(sentences), lines, gap)


# Shops: the place, and goods with a range of prices in dollars.
SHOPS: dict[str, tuple[str, list[tuple[str, str, int, int]]]] = {
    "stationer": (
        "a stationery shop",
        [("pen", "pens", 1, 5), ("notebook", "notebooks", 2, 9), ("folder", "folders", 2, 6), ("calculator", "calculators", 8, 25)],
    ),
    "grocer": (
        "the grocery store",
        [("bag of rice", "bags of rice", 3, 12), ("carton of milk", "cartons of milk", 2, 5), ("melon", "melons", 2, 7), ("pizza", "pizzas", 4, 11)],
    ),
    "clothes": (
        "a clothing store",
        [("shirt", "shirts", 10, 45), ("pair of socks", "pairs of socks", 2, 8), ("hat", "hats", 7, 25), ("jacket", "jackets", 30, 95)],
    ),
    "hardware": (
        "the hardware store",
        [("hammer", "hammers", 8, 25), ("box of nails", "boxes of nails", 2, 9), ("can of paint", "cans of paint", 10, 40), ("brush", "brushes", 2, 9)],
    ),
    "cafe": (
        "a cafe",
        [("sandwich", "sandwiches", 4, 12), ("cup of coffee", "cups of coffee", 2, 5), ("slice of cake", "slices of cake", 3, 7), ("salad", "salads", 5, 13)],
    ),
    "toys": ("a toy store", [("puzzle", "puzzles", 6, 25), ("ball", "balls", 2, 9), ("board game", "board games", 12, 45), ("doll", "dolls", 8, 30)]),
    "plants": (
        "a garden center",
        [("rose bush", "rose bushes", 7, 25), ("bag of soil", "bags of soil", 3, 12), ("pot", "pots", 2, 9), ("shovel", "shovels", 9, 28)],
    ),
    "pets": (
        "a pet shop",
        [("bag of dog food", "bags of dog food", 8, 40), ("leash", "leashes", 5, 18), ("goldfish", "goldfish", 1, 6), ("bird cage", "bird cages", 20, 80)],
    ),
}


def shop(world: str, d: Draw) -> Story:
    place, goods = SHOPS[world]
    p = d.person()
    costs: list[int] = []
    lines, parts = [], []
    for one, many, low, high in d.sample(goods, d.pick((1, 2, 2, 3))):
        count, price = d.number(2, 12), d.number(low, high)
        parts.append(d.pick((f"{count} {many} at ${price} each", f"{count} {many} for ${price} each", f"{count} {many} that cost ${price} each")))
        e = d.mul(count, price)
        lines.append(d.pick((f"The {many} cost {e:$}.", f"{p} pays {e:$} for the {many}.", f"At ${price} for one {one}, the {many} cost {e:$}.")))
        costs.append(e.value)
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    sentences = [d.pick((f"{p} goes to {place} and buys {listed}.", f"At {place}, {p} buys {listed}.", f"{p} buys {listed} at {place}."))]
    total = costs[0]
    if len(costs) > 1:
        e = d.add(*costs)
        lines.append(d.pick((f"Together this costs {e:$}.", f"The total is {e:$}.", f"{p} spends {e:$} in all.")))
        total = e.value
    kind = d.pick(("none", "none", "percent", "coupon", "tax"))
    if kind == "percent":
        n = d.pick([n for n in (5, 10, 15, 20, 25, 30, 50) if total * n % 100 == 0] or [0])
        if not n:
            raise Retry
        d.given(n)
        off = d.percent(total, n)
        e = d.sub(total, off.value)
        sentences.append(d.pick((f"{p.He} gets a discount of {n}%.", f"Everything is {n}% off.", f"A sale takes {n}% off the total.")))
        lines += [f"The discount is {off:$}.", d.pick((f"So {p.he} pays {e:$}.", f"After the discount it costs {e:$}."))]
        total = e.value
    elif kind == "coupon":
        n = d.number(2, 9)
        e = d.sub(total, n)
        sentences.append(d.pick((f"{p.He} has a coupon for ${n} off.", f"A coupon saves {p.him} ${n}.")))
        lines.append(f"With the coupon {p.he} pays {e:$}.")
        total = e.value
    elif kind == "tax":
        n = d.number(2, 15)
        e = d.add(total, n)
        sentences.append(d.pick((f"The shop adds ${n} for delivery.", f"{p.He} also pays ${n} for wrapping.")))
        lines.append(f"With that it costs {e:$}.")
        total = e.value
    ending = d.pick(("total", "change", "change", "split", "left"))
    if ending == "total":
        if len(lines) < 2:
            raise Retry
        sentences.append(d.pick(("How much does this cost in dollars?", f"How many dollars does {p} pay?", f"How much does {p} spend?")))
        return story(" ".join(sentences), lines, total)
    if ending == "split":
        n = d.pick([n for n in range(2, 9) if total % n == 0] or [0])
        if not n:
            raise Retry
        e = d.div(total, d.given(n))
        sentences.append(
            d.pick(
                (
                    f"{p} and {n - 1} friends share the cost equally." if n > 2 else f"{p} and a friend share the cost equally.",
                    f"{n} people split the bill equally.",
                )
            )
        )
        sentences.append("How many dollars does each of them pay?")
        lines.append(f"Each of the {n} pays {e:$}.")
        return story(" ".join(sentences), lines, e)
    if ending == "change":
        bill = d.pick([b for b in (20, 50, 100, 200, 500, 1000) if b > total] or [0])
        sentences.append(d.pick((f"{p.He} pays with ${bill}.", f"{p.He} hands over ${bill}.", f"{p.He} gives the cashier ${bill}.")))
        sentences.append(d.pick((f"How much change does {p.he} get?", "How many dollars of change is that?", f"What change does {p} get back, in dollars?")))
    else:
        bill = d.number(total + 1, total + 150)
        sentences.insert(0, d.pick((f"{p} has ${bill}.", f"{p} takes ${bill} along.")))
        sentences.append(d.pick((f"How much money does {p} have left?", f"How many dollars are left in {p.his} wallet?")))
    d.given(bill)
    e = d.sub(bill, total)
    lines.append(
        d.pick((f"{p} has {e:$} left.", f"What is left is {e:$}.")) if ending == "left" else d.pick((f"The change is {e:$}.", f"{p.He} gets back {e:$}."))
    )
    return story(" ".join(sentences), lines, e)


JOBS = {
    "waiter": ("works as a waiter", "tips"),
    "tutor": ("gives piano lessons", "gifts from parents"),
    "gardener": ("works as a gardener", "selling flowers"),
    "painter": ("paints houses", "a bonus"),
    "driver": ("drives a delivery van", "tips"),
    "programmer": ("writes programs for a company", "a bonus"),
    "mechanic": ("repairs bicycles", "selling spare parts"),
    "babysitter": ("takes care of children", "a gift"),
}
EXPENSES = ["rent", "a new phone", "food", "a train ticket", "a winter coat", "a birthday party", "tools", "a bicycle"]


def earn(world: str, d: Draw) -> Story:
    job, extra = JOBS[world]
    p = d.person()
    hours, days, pay = d.number(2, 9), d.number(2, 7), d.number(6, 40)
    sentences = [
        d.pick((f"{p} {job} for {hours} hours a day and earns ${pay} an hour.", f"{p} {job}. {p.He} earns ${pay} per hour and works {hours} hours each day."))
    ]
    sentences.append(d.pick((f"{p.He} works {days} days a week.", f"This week {p.he} works on {days} days.")))
    if d.chance(0.5):
        e = d.mul(hours, pay)
        week = d.mul(e.value, days)
        lines = [f"{p} earns {e:$} a day.", f"In {days} days {p.he} earns {week:$}."]
    else:
        e = d.mul(hours, days)
        week = d.mul(e.value, pay)
        lines = [f"{p} works {e} hours a week.", f"For this {p.he} gets {week:$}."]
    total = week.value
    if d.chance(0.4):
        n = d.number(2, 4)
        sentences.append(f"{p.He} does this for {n} weeks.")
        e = d.mul(total, n)
        lines.append(f"In {n} weeks that is {e:$}.")
        total = e.value
    if d.chance(0.4):
        n = d.number(5, 150)
        sentences.append(d.pick((f"{p.He} also gets ${n} from {extra}.", f"On top of that come ${n} from {extra}.")))
        e = d.add(total, n)
        lines.append(f"With {extra} it is {e:$}.")
        total = e.value
    kind = d.pick(("none", "spend", "spend", "percent"))
    asked = d.pick((f"How many dollars does {p} earn in all?", f"How much money does {p} make?"))
    if kind == "spend":
        n = d.number(5, max(5, min(total - 2, 500)))
        sentences.append(f"{p.He} spends ${n} on {d.pick(EXPENSES)}.")
        e = d.sub(total, n)
    elif kind == "percent":
        n = d.pick([n for n in (10, 20, 25, 30, 40, 50) if total * n % 100 == 0] or [0])
        if not n:
            raise Retry
        d.given(n)
        sentences.append(d.pick((f"{p.He} pays {n}% of this in taxes.", f"{p.He} gives {n}% of it to {p.his} parents.")))
        e = d.percent(total, n)
        lines.append(f"{n}% of this is {e:$}.")
        e = d.sub(total, e.value)
    if kind != "none":
        lines.append(f"{p.He} keeps {e:$}.")
        total = e.value
        asked = d.pick((f"How many dollars does {p} have left?", f"How much money does {p} keep?"))
    return story(" ".join([*sentences, asked]), lines, total)


MADE = {
    "toy factory": ("A factory", "toys", "box", "boxes"),
    "candy": ("A candy maker", "candies", "bag", "bags"),
    "bottles": ("A machine", "bottles", "crate", "crates"),
    "bricks": ("A brickworks", "bricks", "pallet", "pallets"),
    "pencils": ("A workshop", "pencils", "pack", "packs"),
    "muffins": ("A kitchen", "muffins", "tray", "trays"),
}


def make(world: str, d: Draw) -> Story:
    maker, items, one, many = MADE[world]
    rate, hours, size = d.number(4, 90), d.number(2, 12), d.number(2, 12)
    sentences = [d.pick((f"{maker} makes {rate} {items} an hour.", f"{maker} produces {rate} {items} every hour."))]
    sentences.append(d.pick((f"It runs for {hours} hours.", f"One day it works for {hours} hours.")))
    e = d.mul(rate, hours)
    lines = [d.pick((f"It makes {e} {items}.", f"In {hours} hours that is {e} {items}."))]
    total = e.value
    if d.chance(0.5):
        n = d.number(2, max(2, min(60, total - 2)))
        sentences.append(d.pick((f"{n} of the {items} are broken and thrown away.", f"Of these, {n} are kept as samples.")))
        e = d.sub(total, n)
        lines.append(f"{e} {items} are left.")
        total = e.value
    if total % size or total == size:
        raise Retry
    packs = d.div(total, size)
    sentences.append(d.pick((f"The {items} are put into {many} of {size}.", f"Each {one} holds {size} {items}.")))
    lines.append(d.pick((f"They fill {packs} {many}.", f"That is {packs} {many}.")))
    if d.chance(0.4):
        sentences.append(f"How many {many} are filled?")
        return story(" ".join(sentences), lines, packs)
    price = d.number(2, 20)
    money = d.mul(packs.value, price)
    sentences.append(d.pick((f"Every {one} is sold for ${price}.", f"A {one} costs ${price}.")))
    lines.append(f"They bring {money:$}.")
    if d.chance(0.4):
        cost = d.number(2, max(2, min(money.value - 2, 300)))
        profit = d.sub(money.value, cost)
        sentences += [f"The costs for the day are ${cost}.", d.pick(("What is the profit in dollars?", "How many dollars of profit are made?"))]
        return story(" ".join(sentences), [*lines, f"The profit is {profit:$}."], profit)
    sentences.append(d.pick((f"How many dollars do all the {many} bring?", f"How much money is made by selling all {many}?")))
    return story(" ".join(sentences), lines, money)


VEHICLES = {
    "car": ("drives", 30, 90),
    "bike": ("cycles", 8, 25),
    "walk": ("walks", 2, 6),
    "boat": ("sails", 5, 20),
    "truck": ("drives a truck", 30, 80),
    "ski": ("skis", 6, 18),
}


def travel(world: str, d: Draw) -> Story:
    verb, low, high = VEHICLES[world]
    p = d.person()
    legs = d.pick((1, 2, 2, 3))
    pieces, lines, distances = [], [], []
    for i in range(legs):
        speed, hours = d.number(low, high), d.number(2, 8)
        pieces.append(f"{'' if i else f'{p} {verb} '}for {hours} hours at {speed} kilometers per hour")
        e = d.mul(speed, hours)
        distances.append(e.value)
        lines.append(f"In the {('first', 'second', 'third')[i]} part {p} covers {e} km." if legs > 1 else f"{p} covers {e} km.")
    sentences = [", then ".join(pieces) + "."]
    total = distances[0]
    if legs > 1:
        e = d.add(*distances)
        lines.append(f"Together that is {e} km.")
        total = e.value
    ending = d.pick(("left", "days", "twice", "sum"))
    if ending == "sum":
        if legs == 1:
            raise Retry
        return story(" ".join([*sentences, f"How many kilometers does {p} travel in all?"]), lines, total)
    if ending == "left":
        whole = d.number(total + 2, total + 200)
        e = d.sub(whole, total)
        sentences = [f"{p} plans a trip of {whole} kilometers.", p.He + sentences[0][len(p.name) :]]
        return story(
            " ".join([*sentences, d.pick(("How many kilometers are left?", f"How much farther must {p.he} go, in kilometers?"))]),
            [*lines, f"{e} km are left."],
            e,
        )
    n = d.number(2, 6) if ending == "days" else 2
    e = d.mul(total, n)
    if ending == "days":
        sentences.append(f"{p.He} does this on {n} days. How many kilometers is that altogether?")
        lines.append(f"On {n} days that is {e} km.")
    else:
        sentences.append(f"Then {p.he} comes back the same way. How many kilometers is that there and back?")
        lines.append(f"There and back it is {e} km.")
    return story(" ".join(sentences), lines, e)


def drill(kind: str, d: Draw) -> Story:
    """A bare sum: the arithmetic that the stories rest on."""
    e: Equation
    if kind == "add":
        kind = d.pick(("short", "long", "many"))
        terms = [d.number(2, 999) for _ in range(d.pick((3, 4)) if kind == "many" else 2)] if kind != "long" else [d.number(100, 9999), d.number(2, 9999)]
        e = d.add(*terms)
    elif kind == "subtract":
        a = d.number(10, 999) if d.chance(0.7) else d.number(100, 9999)
        e = d.sub(a, d.number(2, a - 1))
    elif kind == "multiply":
        e = d.mul(d.number(2, 99), d.number(2, 99)) if d.chance(0.6) else d.mul(d.number(10, 999), d.number(2, 12))
    elif kind == "divide":
        by, times = d.hidden(2, 12), d.hidden(2, 400)
        e = d.div(d.given(by * times), d.given(by))
    else:
        share = d.number(5, 95, 5)
        e = d.percent(d.number(20, 900, 20), share)
        return story(d.pick((f"What is {share}% of {e.terms.split('*')[0]}?", f"How much is {share}% of {e.terms.split('*')[0]}?")), [f"It is {e}."], e)
    spaced = format(e, "").split("=")[0].strip()
    return story(
        d.pick((f"What is {spaced}?", f"How much is {spaced}?", f"Calculate {spaced}.", f"{spaced} = ?")), [d.pick((f"{e}.", f"It is {e}.", f"{e}"))], e
    )


def _worlds(composer: Callable[[str, Draw], Story], worlds: Mapping[str, object] | tuple[str, ...]) -> dict[str, Template]:
    return {f"{composer.__name__}: {world}": partial(composer, world) for world in worlds}


CHAINS: dict[str, Template] = (
    _worlds(change, CHANGES) | _worlds(compare, COMPARED) | _worlds(shop, SHOPS) | _worlds(earn, JOBS) | _worlds(make, MADE) | _worlds(travel, VEHICLES)
)
DRILLS: dict[str, Template] = _worlds(drill, ("add", "subtract", "multiply", "divide", "percent"))
