"""Templates told one by one: ages, areas, recipes, tickets, savings, sharing and so on."""

from tools.demo_model.draw import Draw, Story, story


def ages(d: Draw) -> Story:
    a, b, c = d.people(3)
    age, gap, times, years = d.number(4, 30), d.number(2, 15), d.number(2, 3), d.number(2, 12)
    older, oldest = d.add(age, gap), d.mul(age, times)
    s = [f"{a} is {age} years old.", f"{b} is {gap} years older than {a}.", f"{c} is {('', '', 'twice', 'three times')[times]} as old as {a}."]
    lines = [f"{b} is {older} years old.", f"{c} is {oldest} years old."]
    if d.chance(0.5):
        now = d.add(age, older.value, oldest.value)
        return story(
            " ".join([*s, d.pick(("What is the sum of their ages?", "How old are the three together?"))]), [*lines, f"Together they are {now} years old."], now
        )
    later = d.add(older.value, years)
    latest = d.add(oldest.value, years)
    both = d.add(later.value, latest.value)
    lines += [f"In {years} years {b} will be {later}.", f"In {years} years {c} will be {latest}.", f"Together they will then be {both}."]
    return story(" ".join([*s, f"How old will {b} and {c} be together in {years} years?"]), lines, both)


def age_back(d: Draw) -> Story:
    a, b = d.people(2)
    past, years, gap = d.number(3, 40), d.number(2, 20), d.number(2, 25)
    now = d.add(past, years)
    other = d.add(now.value, gap)
    q = d.pick(
        (
            f"{years} years ago, {a} was {past} years old. {b} is {gap} years older than {a}. How old is {b} now?",
            f"{b} is {gap} years older than {a}, who was {past} years old {years} years ago. What is {b}'s age today?",
        )
    )
    return story(q, [f"{a} is now {now} years old.", f"{b} is {other} years old."], other)


def rectangle(d: Draw) -> Story:
    p = d.person()
    width, length = d.number(3, 40), d.number(3, 60)
    place = d.pick(("garden", "yard", "field", "playground"))
    s = [f"{p} has a rectangular {place} that is {length} meters long and {width} meters wide."]
    if d.chance(0.5):
        half = d.add(length, width)
        around = d.mul(half.value, 2)
        price = d.number(2, 15)
        cost = d.mul(around.value, price)
        s.append(
            d.pick(
                (
                    f"{p.He} builds a fence around it. A meter of fence costs ${price}. How much does the fence cost?",
                    f"A fence around it costs ${price} per meter. How many dollars does {p} pay for the fence?",
                )
            )
        )
        return story(" ".join(s), [f"One length and one width are {half} meters.", f"The fence is {around} meters long.", f"It costs {cost:$}."], cost)
    area = d.mul(length, width)
    price = d.number(2, 9)
    cost = d.mul(area.value, price)
    s.append(
        d.pick(
            (
                f"Grass seed costs ${price} for a square meter. How much does it cost to sow the whole {place}?",
                f"{p.He} covers it with grass for ${price} per square meter. How many dollars is that?",
            )
        )
    )
    return story(" ".join(s), [f"The {place} has {area} square meters.", f"The cost is {cost:$}."], cost)


def reading(d: Draw) -> Story:
    p = d.person()
    per_day, days, rest = d.number(5, 60), d.number(2, 14), d.hidden(2, 12)
    read = d.mul(per_day, days)
    speed = d.number(5, 40)
    pages = d.given(read.value + rest * speed)
    left = d.sub(pages, read.value)
    more = d.div(left.value, speed)
    s = d.pick(
        (
            f"{p} reads a book of {pages} pages. For {days} days {p.he} reads {per_day} pages a day.",
            f"A book has {pages} pages. {p} reads {per_day} pages every day for {days} days.",
        )
    )
    lines = [f"In {days} days {p} reads {read} pages.", f"There are {left} pages left."]
    if d.chance(0.5):
        return story(f"{s} How many pages are left?", lines, left)
    return story(f"{s} After that {p.he} reads {speed} pages a day. How many more days does {p.he} need?", [*lines, f"{p.He} needs {more} more days."], more)


def saving(d: Draw) -> Story:
    p = d.person()
    have, weekly, weeks = d.number(5, 150), d.number(3, 40), d.hidden(2, 25)
    price = d.given(have + weekly * weeks)
    need = d.sub(price, have)
    e = d.div(need.value, weekly)
    thing = d.pick(("bicycle", "guitar", "camera", "tablet", "skateboard", "telescope", "drum kit"))
    q = d.pick(
        (
            f"{p} wants to buy a {thing} for ${price}. {p.He} already has ${have} and saves ${weekly} every week. How many weeks does {p.he} need?",
            f"A {thing} costs ${price}. {p} has saved ${have} so far and puts aside ${weekly} a week. In how many weeks can {p.he} buy it?",
        )
    )
    return story(q, [d.pick((f"{p} still needs {need:$}.", f"The missing amount is {need:$}.")), f"This takes {e} weeks."], e)


def sharing(d: Draw) -> Story:
    p = d.person()
    item = d.pick(("cookies", "candies", "grapes", "crackers", "balloons", "strawberries"))
    friends, each, eaten = d.number(2, 12), d.hidden(2, 25), d.number(2, 30)
    left_over = friends * each
    bags = d.pick([n for n in (2, 3, 4, 5, 6, 8, 10) if (left_over + eaten) % n == 0] or [1])
    if bags == 1:
        whole = d.given(left_over + eaten)
        s = [f"{p} has {whole} {item}."]
        lines = []
    else:
        d.given(bags)
        size = d.given((left_over + eaten) // bags)
        e = d.mul(bags, size)
        whole = e.value
        s = [f"{p} has {bags} bags with {size} {item} in each."]
        lines = [f"{p} has {e} {item}."]
    rest = d.sub(whole, eaten)
    share = d.div(rest.value, friends)
    s.append(
        d.pick(
            (
                f"{p.He} eats {eaten} of them and shares the rest equally among {friends} friends.",
                f"After {eaten} are eaten, {friends} friends share the rest equally.",
            )
        )
    )
    s.append(d.pick((f"How many {item} does each friend get?", "How many does each friend receive?")))
    return story(" ".join(s), [*lines, f"{rest} {item} are left.", f"Each friend gets {share}."], share)


def recipe(d: Draw) -> Story:
    p = d.person()
    first, second = d.sample(("flour", "sugar", "butter", "milk", "oats", "nuts"), 2)
    people, a, b, times = d.number(2, 8), d.number(20, 300, 10), d.number(10, 200, 10), d.hidden(2, 8)
    guests = d.given(people * times)
    factor = d.div(guests, people)
    amount_a, amount_b = d.mul(a, times), d.mul(b, times)
    s = f"A recipe for {people} people needs {a} grams of {first} and {b} grams of {second}. {p} cooks for {guests} people."
    lines = [f"{p} makes the recipe {factor} times.", f"{p.He} needs {amount_a} grams of {first}."]
    if d.chance(0.4):
        return story(f"{s} How many grams of {first} does {p.he} need?", lines, amount_a)
    both = d.add(amount_a.value, amount_b.value)
    lines += [f"{p.He} needs {amount_b} grams of {second}.", f"Together this is {both} grams."]
    return story(f"{s} How many grams of {first} and {second} does {p.he} need together?", lines, both)


def tickets(d: Draw) -> Story:
    place = d.pick(("a circus", "a cinema", "a zoo", "a theater", "a swimming pool", "an amusement park"))
    adult, child, adults, children = d.number(5, 40), d.number(2, 20), d.number(2, 40), d.number(2, 60)
    a, c = d.mul(adults, adult), d.mul(children, child)
    total = d.add(a.value, c.value)
    s = d.pick(
        (
            f"Tickets for {place} cost ${adult} for adults and ${child} for children. {adults} adults and {children} children go in.",
            f"At {place} an adult pays ${adult} and a child pays ${child}. On one day {adults} adults and {children} children come.",
        )
    )
    lines = [f"The adults pay {a:$}.", f"The children pay {c:$}.", f"Together they pay {total:$}."]
    if d.chance(0.6):
        return story(f"{s} {d.pick(('How many dollars do they pay in all?', 'How much money is taken in?'))}", lines, total)
    cost = d.number(2, max(2, min(total.value - 2, 500)))
    profit = d.sub(total.value, cost)
    return story(f"{s} The staff costs ${cost}. How many dollars are left after paying the staff?", [*lines, f"{profit:$} are left."], profit)


def rows(d: Draw) -> Story:
    seats, count, empty = d.number(5, 40), d.number(4, 40), d.number(2, 60)
    e = d.mul(seats, count)
    taken = d.sub(e.value, empty)
    place = d.pick(("hall", "theater", "stadium block", "cinema"))
    s = d.pick((f"A {place} has {count} rows with {seats} seats in each row.", f"There are {count} rows of {seats} seats in a {place}."))
    lines = [f"There are {e} seats.", f"{taken} seats are taken."]
    if d.chance(0.5):
        return story(f"{s} {empty} seats stay empty. How many people are sitting there?", lines, taken)
    price = d.number(2, 20)
    money = d.mul(taken.value, price)
    return story(f"{s} All but {empty} seats are sold at ${price} each. How many dollars is that?", [*lines, f"They bring {money:$}."], money)


def fuel(d: Draw) -> Story:
    p = d.person()
    per, liters, price = d.number(5, 25), d.hidden(3, 60), d.number(1, 4)
    distance = d.given(per * liters)
    e = d.div(distance, per)
    cost = d.mul(e.value, price)
    s = d.pick(
        (
            f"{p}'s car goes {per} kilometers on a liter of fuel. {p.He} drives {distance} kilometers.",
            f"{p} drives {distance} kilometers. {p.His} car needs a liter of fuel for every {per} kilometers.",
        )
    )
    lines = [f"The car needs {e} liters."]
    if price == 1:
        return story(f"{s} How many liters of fuel does {p.he} need?", lines, e)
    return story(f"{s} A liter costs ${price}. How much does the fuel cost in dollars?", [*lines, f"The fuel costs {cost:$}."], cost)


def classroom(d: Draw) -> Story:
    boys, girls, each = d.number(5, 30), d.number(5, 30), d.number(2, 15)
    total = d.add(boys, girls)
    e = d.mul(total.value, each)
    item = d.pick(("pencils", "crayons", "sheets of paper", "stickers", "beads"))
    s = d.pick(
        (
            f"A class has {boys} boys and {girls} girls. Every child needs {each} {item}.",
            f"There are {boys} boys and {girls} girls in a class, and each child gets {each} {item}.",
        )
    )
    lines = [f"There are {total} children.", f"They need {e} {item}."]
    if d.chance(0.5):
        return story(f"{s} How many {item} does the class need?", lines, e)
    have = d.number(2, e.value - 1)
    more = d.sub(e.value, have)
    return story(f"{s} The teacher has {have} {item}. How many more does the teacher need?", [*lines, f"{more} more are needed."], more)


def loan(d: Draw) -> Story:
    p, q = d.people(2)
    paid, months, monthly = d.number(10, 300), d.hidden(2, 24), d.number(5, 80)
    total = d.given(paid + months * monthly)
    rest = d.sub(total, paid)
    e = d.div(rest.value, monthly)
    s = f"{p} borrows ${total} from {q}. {p.He} pays back ${paid} at once"
    return story(
        f"{s} and then ${monthly} every month. How many months does it take to pay back everything?",
        [f"After the first payment {p} owes {rest:$}.", f"This takes {e} months."],
        e,
    )


def animals(d: Draw) -> Story:
    p = d.person()
    legs = {"cows": 4, "hens": 2, "goats": 4, "ducks": 2, "sheep": 4, "geese": 2}
    a, b = d.sample(("cows", "hens", "goats", "ducks", "sheep", "geese"), 2)
    n, m = d.number(2, 60), d.number(2, 60)
    x, y = d.mul(n, legs[a]), d.mul(m, legs[b])
    e = d.add(x.value, y.value)
    d.given(legs[a] * 10 + legs[b])
    q = d.pick(
        (
            f"{p} keeps {n} {a} and {m} {b}. How many legs do the animals have in all?",
            f"On {p}'s farm there are {n} {a} and {m} {b}. How many legs is that altogether?",
        )
    )
    return story(q, [f"The {a} have {x} legs.", f"The {b} have {y} legs.", f"Together they have {e} legs."], e)


def feeding(d: Draw) -> Story:
    p = d.person()
    n, grams, days = d.number(2, 25), d.number(10, 300, 10), d.number(2, 14)
    animal = d.pick(("dogs", "cats", "rabbits", "horses", "parrots"))
    daily = d.mul(n, grams)
    e = d.mul(daily.value, days)
    q = d.pick(
        (
            f"{p} has {n} {animal}. Each eats {grams} grams of food a day. How many grams do they eat in {days} days?",
            f"Each of {p}'s {n} {animal} gets {grams} grams of food every day. How much food in grams is that for {days} days?",
        )
    )
    return story(q, [f"They eat {daily} grams a day.", f"In {days} days they eat {e} grams."], e)


def exam(d: Draw) -> Story:
    p = d.person()
    scores = [d.number(40, 100) for _ in range(d.pick((2, 3, 4)))]
    total = d.add(*scores)
    e = d.div(total.value, len(scores))
    listed = ", ".join(map(str, scores[:-1])) + f" and {scores[-1]}"
    q = d.pick(
        (
            f"{p} scores {listed} points in {len(scores)} tests. What is {p.his} average?",
            f"In {len(scores)} tests {p} gets {listed} points. How many points is that on average?",
        )
    )
    return story(q, [f"The sum is {total} points.", f"The average is {e} points."], e)


def percent_students(d: Draw) -> Story:
    total, share = d.number(20, 800, 20), d.number(10, 90, 5)
    part = d.percent(total, share)
    rest = d.sub(total, part.value)
    verb = d.pick(("wear glasses", "play football", "walk to school", "have a pet", "sing in the choir"))
    s = f"{share}% of the {total} students of a school {verb}."
    lines = [f"{part} students {verb}.", f"{rest} do not."]
    kind = d.pick(("part", "rest", "gap"))
    if kind == "part":
        return story(f"{s} How many students {verb}?", lines[:1], part)
    if kind == "rest":
        return story(f"{s} How many students do not {verb}?", lines, rest)
    extra = d.number(2, max(2, min(50, rest.value)))
    e = d.add(part.value, extra)
    return story(f"{s} Then {extra} new students come who {verb} as well. How many students {verb} now?", [lines[0], f"Now {e} students {verb}."], e)


def marathon(d: Draw) -> Story:
    p = d.person()
    first, more, days = d.number(2, 20), d.number(2, 8), d.pick((3, 4))
    values, lines = [first], []
    for _ in range(days - 1):
        e = d.add(values[-1], more)
        values.append(e.value)
        lines.append(f"The next day {p} runs {e} kilometers.")
    d.given(days)
    total = d.add(*values)
    q = d.pick(
        (
            f"{p} runs {first} kilometers on the first day and {more} kilometers more on each following day. How many kilometers does {p.he} run in {days} days?",
            f"On the first of {days} days {p} runs {first} kilometers. Every day after that {p.he} runs {more} kilometers more than the day before. How far does {p.he} run in all?",
        )
    )
    return story(q, [*lines, f"In all that is {total} kilometers."], total)


def phone(d: Draw) -> Story:
    p = d.person()
    fee, free, price, over = d.number(5, 60), d.number(20, 300, 10), d.number(2, 9), d.number(2, 60)
    minutes = d.given(free + over)
    extra = d.sub(minutes, free)
    cost = d.mul(extra.value, price)
    e = d.add(fee, cost.value)
    q = f"A phone plan costs ${fee} a month with {free} free minutes. Each further minute costs ${price}. {p} talks for {minutes} minutes. How many dollars does {p.he} pay?"
    return story(q, [f"{p} talks {extra} minutes more than are free.", f"These cost {cost:$}.", f"In all {p.he} pays {e:$}."], e)


def parking_fee(d: Draw) -> Story:
    p = d.person()
    first, other, hours = d.number(2, 12), d.number(2, 9), d.number(3, 12)
    rest = d.sub(hours, 1)
    cost = d.mul(rest.value, other)
    e = d.add(first, cost.value)
    q = d.pick(
        (
            f"Parking costs ${first} for the first hour and ${other} for each hour after that. {p} parks for {hours} hours. How much does {p.he} pay?",
            f"A garage takes ${first} for the first hour and ${other} for every further hour. How many dollars does {p} pay for {hours} hours?",
        )
    )
    return story(q, [f"After the first hour there are {rest} hours.", f"They cost {cost:$}.", f"{p} pays {e:$}."], e)


def boxes(d: Draw) -> Story:
    p = d.person()
    a, b, x, y = d.number(2, 20), d.number(2, 20), d.number(3, 30), d.number(3, 30)
    item = d.pick(("oranges", "batteries", "light bulbs", "tomatoes", "tennis balls"))
    first, second = d.mul(a, x), d.mul(b, y)
    total = d.add(first.value, second.value)
    s = d.pick(
        (
            f"{p} packs {a} small boxes with {x} {item} each and {b} large boxes with {y} {item} each.",
            f"There are {a} small boxes of {x} {item} and {b} large boxes of {y} {item}.",
        )
    )
    lines = [f"The small boxes hold {first} {item}.", f"The large boxes hold {second} {item}."]
    if d.chance(0.6) or first.value == second.value:
        return story(f"{s} How many {item} are there in all?", [*lines, f"In all there are {total} {item}."], total)
    high, low = max(first.value, second.value), min(first.value, second.value)
    e = d.sub(high, low)
    which = ("small", "large") if first.value > second.value else ("large", "small")
    return story(f"{s} How many more {item} are in the {which[0]} boxes than in the {which[1]} boxes?", [*lines, f"That is {e} more."], e)


def clock(d: Draw) -> Story:
    p = d.person()
    tasks = d.sample(("cleaning", "homework", "cooking", "practice", "reading", "shopping"), 3)
    minutes = [d.number(5, 90, 5) for _ in tasks]
    total = d.add(*minutes)
    free = d.number(total.value + 5, total.value + 200, 5)
    e = d.sub(free, total.value)
    listed = f"{minutes[0]} minutes for {tasks[0]}, {minutes[1]} minutes for {tasks[1]} and {minutes[2]} minutes for {tasks[2]}"
    s = f"{p} needs {listed}."
    if d.chance(0.4):
        return story(f"{s} How many minutes is that in all?", [f"This takes {total} minutes."], total)
    return story(f"{p} has {free} minutes. {p.He} needs {listed}. How many minutes are left?", [f"This takes {total} minutes.", f"{e} minutes are left."], e)


def building(d: Draw) -> Story:
    floors, flats, people = d.number(3, 30), d.number(2, 12), d.number(2, 6)
    e = d.mul(floors, flats)
    total = d.mul(e.value, people)
    s = d.pick(
        (
            f"A building has {floors} floors with {flats} apartments on each floor. {people} people live in every apartment.",
            f"In a house with {floors} floors there are {flats} apartments per floor, and each is home to {people} people.",
        )
    )
    lines = [f"There are {e} apartments.", f"{total} people live there."]
    if d.chance(0.6):
        return story(f"{s} How many people live in the building?", lines, total)
    away = d.number(2, total.value - 1)
    home = d.sub(total.value, away)
    return story(f"{s} Today {away} of them are away. How many are at home?", [*lines, f"{home} are at home."], home)


def harvest(d: Draw) -> Story:
    p, q = d.people(2)
    trees, each, share = d.number(3, 40), d.number(5, 60), d.pick((2, 3, 4, 5))
    fruit = d.pick(("pears", "plums", "lemons", "peaches", "cherries"))
    total = d.mul(trees, each)
    part = d.div(total.value, d.given(share))
    rest = d.sub(total.value, part.value)
    word = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[share]
    s = d.pick(
        (
            f"{p} has {trees} trees, and each gives {each} {fruit}. {p.He} gives {word} of the {fruit} to {q}.",
            f"Each of {p}'s {trees} trees bears {each} {fruit}. {q} gets {word} of them.",
        )
    )
    lines = [f"The trees give {total} {fruit}.", f"{q} gets {part} {fruit}."]
    if d.chance(0.4):
        return story(f"{s} How many {fruit} does {q} get?", lines, part)
    return story(f"{s} How many {fruit} does {p} keep?", [*lines, f"{p} keeps {rest} {fruit}."], rest)


def two_shops(d: Draw) -> Story:
    p = d.person()
    n, cheap, dear = d.number(2, 25), d.number(2, 30), d.number(3, 60)
    if dear <= cheap:
        cheap, dear = dear, cheap + 1
        d.given(dear)
    item = d.pick(("chairs", "lamps", "books", "mugs", "towels"))
    a, b = d.mul(n, dear), d.mul(n, cheap)
    e = d.sub(a.value, b.value)
    q = d.pick(
        (
            f"{p} needs {n} {item}. One shop sells them for ${dear} each, another for ${cheap} each. How many dollars does {p.he} save in the cheaper shop?",
            f"The price of {n} {item} is ${dear} each in one shop and ${cheap} each in another. How much cheaper, in dollars, are all {n} in the second shop?",
        )
    )
    return story(q, [f"In the first shop they cost {a:$}.", f"In the second shop they cost {b:$}.", f"The difference is {e:$}."], e)


def club(d: Draw) -> Story:
    members, fee, months = d.number(4, 60), d.number(2, 30), d.number(2, 12)
    rent = d.number(10, 400, 10)
    monthly = d.mul(members, fee)
    total = d.mul(monthly.value, months)
    left = d.sub(total.value, rent)
    kind = d.pick(("chess", "swimming", "tennis", "photo", "book"))
    s = f"A {kind} club has {members} members who pay ${fee} a month."
    lines = [f"Each month they pay {monthly:$}.", f"In {months} months that is {total:$}."]
    if d.chance(0.5):
        return story(f"{s} How many dollars does the club get in {months} months?", lines, total)
    return story(f"{s} After {months} months the club spends ${rent} on a party. How many dollars are left?", [*lines, f"{left:$} are left."], left)


STORIES = {
    t.__name__.replace("_", " "): t
    for t in (
        ages, age_back, rectangle, reading, saving, sharing, recipe, tickets, rows, fuel, classroom, loan, animals, feeding, exam, percent_students, marathon, phone,
        parking_fee, boxes, clock, building, harvest, two_shops, club,
    )
}  # fmt: skip
