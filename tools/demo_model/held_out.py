"""Templates that training never sees: other stories, other orders of operations, other words."""

from tools.demo_model.draw import Draw, Story, story


def candle(d: Draw) -> Story:
    rate, hours, rest = d.number(2, 9), d.number(2, 9), d.number(2, 40)
    burnt = d.mul(rate, hours)
    height = d.given(burnt.value + rest)
    left = d.sub(height, burnt.value)
    q = f"A candle is {height} centimeters tall. While it burns it gets {rate} centimeters shorter every hour. How tall, in centimeters, is it after {hours} hours?"
    return story(q, [f"The candle loses {burnt} centimeters.", f"It is {left} centimeters tall."], left)


def bees(d: Draw) -> Story:
    hives, bees_each, flowers = d.number(2, 20), d.number(10, 90), d.number(2, 9)
    total = d.mul(hives, bees_each)
    e = d.mul(total.value, flowers)
    q = f"A beekeeper looks after {hives} hives. In every hive live {bees_each} bees, and each bee visits {flowers} flowers in the morning. How many flowers are visited that morning?"
    return story(q, [f"There are {total} bees.", f"They visit {e} flowers."], e)


def donation(d: Draw) -> Story:
    a, b = d.people(2)
    first, times, match = d.number(5, 90), d.number(2, 4), d.number(10, 90)
    second = d.mul(first, times)
    both = d.add(first, second.value)
    e = d.add(both.value, match)
    word = ("", "", "twice", "three times", "four times")[times]
    q = f"For a new roof, {a} donates ${first}. {b} gives {word} that amount, and the city adds ${match}. How many dollars are collected for the roof?"
    return story(q, [f"{b} gives {second:$}.", f"The two give {both:$}.", f"With the city's money it is {e:$}."], e)


def fence_posts(d: Draw) -> Story:
    p = d.person()
    gap, count, price = d.number(2, 9), d.hidden(3, 40), d.number(2, 12)
    length = d.given(gap * count)
    pieces = d.div(length, gap)
    e = d.mul(pieces.value, price)
    q = f"Along a path of {length} meters {p} sets a lantern every {gap} meters. One lantern is worth ${price}. What are all the lanterns worth in dollars?"
    return story(q, [f"{p} sets {pieces} lanterns.", f"They are worth {e:$}."], e)


def orchestra(d: Draw) -> Story:
    violins, more, part = d.number(4, 40), d.number(2, 20), d.number(2, 12)
    flutes = d.add(violins, more)
    both = d.add(violins, flutes.value)
    e = d.sub(both.value, part)
    q = f"In an orchestra there are {violins} violins. The number of flutes is greater by {more}. If {part} of all these players are ill, how many of them can play tonight?"
    return story(q, [f"There are {flutes} flutes.", f"Together there are {both} players.", f"Tonight {e} can play."], e)


def printer(d: Draw) -> Story:
    p = d.person()
    per_minute, minutes, copies = d.number(3, 30), d.number(2, 20), d.hidden(2, 12)
    pages = d.mul(per_minute, minutes)
    d.given(copies)
    e = d.div(pages.value, copies)
    q = f"A printer prints {per_minute} pages in a minute. {p} lets it print for {minutes} minutes and makes reports of {copies} pages each out of them. How many reports does {p.he} get?"
    return story(q, [f"The printer prints {pages} pages.", f"{p} gets {e} reports."], e)


def ladder(d: Draw) -> Story:
    p = d.person()
    up, down, again = d.number(5, 40), d.number(2, 20), d.number(2, 30)
    a = d.sub(up, down)
    b = d.add(a.value, again)
    q = f"{p} climbs {up} steps up a tower, goes {down} steps down because {p.he} forgot {p.his} hat, and then climbs another {again} steps. On which step is {p.he} standing?"
    return story(q, [f"After going down {p} is on step {a}.", f"Then {p.he} is on step {b}."], b)


def choir(d: Draw) -> Story:
    total, share, left = d.number(20, 400, 20), d.number(10, 60, 10), d.number(2, 8)
    part = d.percent(total, share)
    e = d.sub(part.value, left)
    q = f"Of {total} people in a village, {share}% sing in the choir. {left} singers have a cold. How many singers come to the concert?"
    return story(q, [f"{part} people sing in the choir.", f"{e} come to the concert."], e)


def necklace(d: Draw) -> Story:
    p = d.person()
    red, blue, count = d.number(3, 30), d.number(3, 30), d.number(2, 12)
    one = d.add(red, blue)
    e = d.mul(one.value, count)
    q = f"For one necklace {p} strings {red} red beads and {blue} blue beads. {p.He} makes {count} necklaces like this. How many beads does {p.he} need?"
    return story(q, [f"One necklace has {one} beads.", f"{count} necklaces need {e} beads."], e)


def snow(d: Draw) -> Story:
    night, hours, rate, melt = d.number(5, 60), d.number(2, 9), d.number(2, 9), d.number(2, 20)
    fallen = d.mul(hours, rate)
    total = d.add(night, fallen.value)
    e = d.sub(total.value, melt)
    q = f"At dawn the snow is {night} centimeters deep. During the day {rate} centimeters fall every hour for {hours} hours, and in the evening {melt} centimeters melt. How deep is the snow at night, in centimeters?"
    return story(q, [f"{fallen} centimeters fall.", f"The snow is then {total} centimeters deep.", f"At night it is {e} centimeters deep."], e)


def auction(d: Draw) -> Story:
    a, b = d.people(2)
    start, step, bids, fee = d.number(10, 300, 10), d.number(5, 50, 5), d.number(2, 12), d.number(2, 40)
    rise = d.mul(step, bids)
    price = d.add(start, rise.value)
    e = d.add(price.value, fee)
    q = f"At an auction a painting starts at ${start}. {a} and {b} raise the price by ${step} with each of their {bids} bids. The winner pays the last price and a fee of ${fee}. How many dollars is that?"
    return story(q, [f"The bids raise the price by {rise:$}.", f"The last price is {price:$}.", f"With the fee it is {e:$}."], e)


def camp(d: Draw) -> Story:
    tents, each, boats = d.number(2, 20), d.number(2, 8), d.hidden(2, 6)
    total = d.mul(tents, each)
    d.given(boats)
    e = d.div(total.value, boats)
    q = f"At a summer camp {each} children sleep in each of {tents} tents. For a race they form teams of {boats}. How many teams are there?"
    return story(q, [f"There are {total} children.", f"They form {e} teams."], e)


HELD_OUT = {t.__name__.replace("_", " "): t for t in (candle, bees, donation, fence_posts, orchestra, printer, ladder, choir, necklace, snow, auction, camp)}
