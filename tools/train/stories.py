"""Short stories and small worlds made from templates: simple words, whole sentences, a beginning and an end."""
HEROES = [('a little girl', 'she', 'her', ('Anna', 'Lily', 'Mary', 'Rose', 'Clara', 'Emma', 'Nora', 'Lucy', 'Ida', 'Grace')),
          ('a small boy', 'he', 'his', ('Tom', 'Ben', 'Peter', 'John', 'Max', 'Sam', 'Paul', 'Hugo', 'Leo', 'Jack')),
          ('a young fox', 'he', 'his', ('Rusty', 'Red', 'Rufus')), ('a grey mouse', 'she', 'her', ('Mimi', 'Pip', 'Tilly')),
          ('an old farmer', 'he', 'his', ('Mr. Brown', 'Mr. Hill', 'Mr. Wood')), ('a brown bear', 'he', 'his', ('Bruno', 'Barney')),
          ('a clever rabbit', 'she', 'her', ('Hazel', 'Daisy', 'Clover')), ('a poor fisherman', 'he', 'his', ('Olaf', 'Erik', 'Marco')),
          ('a young queen', 'she', 'her', ('Eleanor', 'Isabel', 'Maud')), ('a black cat', 'she', 'her', ('Luna', 'Inky')),
          ('a wise owl', 'he', 'his', ('Oliver', 'Hoot')), ('a white duck', 'she', 'her', ('Dora', 'Puddle'))]
PLACES = ['a small village by the sea', 'a house at the edge of the forest', 'a town in the mountains', 'a quiet valley', 'an old mill by the river', 'a farm on a hill',
          'a little cottage near the lake', 'a castle on a rock', 'a green wood', 'a warm land in the south']
THINGS = ['a golden key', 'a red ball', 'a silver ring', 'an old book', 'a wooden boat', 'a blue hat', 'a warm coat', 'a sweet apple', 'a bright lamp', 'a small bell', 'a map', 'a basket of bread',
          'a white flower', 'a letter', 'a round stone', 'a drum', 'a kite', 'a loaf of bread']
WEATHER = ['The sun was shining and the birds were singing.', 'It was raining, and the wind was cold.', 'Snow lay on the ground, and all was still.', 'The sky was grey, but it did not rain.',
           'It was a warm evening in summer.', 'The leaves were falling from the trees.', 'There was a thick fog that morning.']
MOODS = [('sad', 'began to cry'), ('worried', 'looked around'), ('tired', 'sat down to rest'), ('lonely', 'wanted a friend'), ('hungry', 'looked for something to eat'), ('cold', 'lit a fire')]
LOST = ['{H} had lost {o}, and {s} could not find it anywhere.', 'One night somebody took {o} from {p} house.', '{H} wanted {o} more than anything in the world.', '{H} had promised to bring {o} to {p} mother.',
        'In a dream {s} saw {o} under a tall tree.', 'A stranger told {H} about {o} that lay hidden far away.']
SEARCH = ['So {s} packed some bread and cheese and set out.', '{S} looked in the garden, behind the door and under the bed.', '{S} walked for three days and three nights.', '{S} asked everyone on the road, but nobody knew.',
          '{S} took a small boat and crossed the river.', '{S} climbed the hill and looked down into the valley.']
MEET = ['On the way {s} met {x}.', 'There, beside the road, sat {x}.', 'Soon {x} came out of the wood.', 'At the bridge {s} found {x}.', 'When the night came, {s} heard the voice of {x}.']
HELPERS = [('an old woman', 'the old woman'), ('a lame dog', 'the dog'), ('a little bird', 'the bird'), ('a tall soldier', 'the soldier'), ('a hungry wolf', 'the wolf'), ('a merry tailor', 'the tailor'), ('a green frog', 'the frog'),
           ('a shepherd', 'the shepherd'), ('a blind king', 'the king'), ('a talking fish', 'the fish')]
ASK = ['"Where are you going?" asked {y}.', '"Why are you so {m}?" asked {y}.', '"Good day," said {y}. "What are you looking for?"', '"You look {m}," said {y}. "What is the matter?"']
ANSWER = ['"I am looking for {o}," said {H}. "Can you help me?"', '"I must find {o} before the winter comes," {s} answered.', '"I want {o}," said {H}, "but I do not know where it is."']
DEAL = ['"Give me some of your bread, and I will show you the way," said {y}.', '"I know where it is," said {y}. "Come with me."', '"I will help you, because you asked me kindly," said {y}.',
        '"It is under the big oak behind the church," said {y}.', '"Nobody has ever asked me before," said {y}. "Follow me."']
DONE = ['{H} shared the bread with {y}, and together they went on.', '{H} thanked {y} and ran as fast as {s} could.', 'They walked until they came to a great tree, and there it was.', '{S} dug in the ground, and after an hour {s} found what {s} was looking for.',
        'They opened the old door, and behind it was a little room full of light.']
END = ['{H} took {t} home, and everyone was glad.', 'When {s} came home with {t}, {p} mother kissed {k}.', 'From that day on {H} and {y} were good friends.', '{S} gave {t} to {y}, because {y} needed it more.', 'That night {s} slept well, with {t} beside {k}.']
MORAL = ['And they lived happily for many years.', 'A kind word opens many doors.', 'And if they have not gone away, they live there still.', 'So it is good to ask for help.', 'And that is the end of the story.', 'Since then nobody in that place has been afraid of the dark.']


def story(r, about=None):
    """One story; `about` = a hero's kind ("fox") that must appear."""
    pool = [h for h in HEROES if about is None or h[0].split()[-1] == about] or HEROES
    kind, s, p, names = r.choice(pool)
    H = r.choice(names)
    o = r.choice(THINGS)
    x, y = r.choice(HELPERS)
    m, act = r.choice(MOODS)
    f = dict(H=H, s=s, S=s[0].upper() + s[1:], p=p, k='her' if s == 'she' else 'him', o=o, t='the ' + o.split(' ', 1)[1], x=x, y=y, m=m)
    start = r.choice([f'Once upon a time there was {kind} named {H}, who lived in {r.choice(PLACES)}.', f'There was once {kind} called {H}. {f["S"]} lived in {r.choice(PLACES)}.',
                      f'In {r.choice(PLACES)} there lived {kind} whose name was {H}.'])
    a = [start, r.choice(WEATHER), r.choice(LOST), f'{f["S"]} was {m} and {act}.' if r.random() < .5 else '', r.choice(SEARCH)]
    b = [r.choice(MEET), r.choice(ASK), r.choice(ANSWER), r.choice(DEAL)]
    c = [r.choice(DONE), r.choice(END), r.choice(MORAL)]
    join = lambda q: ' '.join(z.format(**f) for z in q if z)
    if r.random() < .4:
        return join(a + b[:2] + c)
    return '\n\n'.join((join(a), join(b), join(c)))


ROOMS = ['kitchen', 'garden', 'school', 'barn', 'church', 'market', 'library', 'cellar', 'tower', 'shop', 'bedroom', 'station']
ITEMS = ['ball', 'book', 'key', 'hat', 'cup', 'lamp', 'ring', 'coat', 'knife', 'letter', 'bag', 'box', 'coin', 'map', 'bell', 'apple']
NAMES = sorted({n for h in HEROES[:2] for n in h[3]} | {'Alice', 'Bob', 'Carl', 'Diana', 'Fred', 'Helen', 'Karl', 'Martha', 'Oscar', 'Ruth', 'Susan', 'Victor', 'Walter', 'Zoe'})


def world(r, n):
    """People move and carry things; returns the text, and questions with answers and reasons."""
    people, items = r.sample(NAMES, r.randint(2, 4)), r.sample(ITEMS, r.randint(1, 3))
    at, holder, place, lines = {}, {}, {}, []
    for who in people:
        at[who] = r.choice(ROOMS)
        lines.append(r.choice([f'{who} is in the {at[who]}.', f'{who} went to the {at[who]}.']))
    for _ in range(n):
        who = r.choice(people)
        free = [i for i in items if i not in holder and place.get(i, at[who]) == at[who]]
        held = [i for i in items if holder.get(i) == who]
        k = r.random()
        if k < .4 and free:
            i = r.choice(free)
            holder[i] = who
            lines.append(r.choice([f'{who} took the {i}.', f'{who} picked up the {i}.']))
        elif k < .6 and held:
            i = r.choice(held)
            del holder[i]
            place[i] = at[who]
            lines.append(r.choice([f'{who} put down the {i}.', f'{who} left the {i} there.']))
        else:
            at[who] = r.choice([x for x in ROOMS if x != at[who]])
            lines.append(r.choice([f'{who} went to the {at[who]}.', f'Then {who} walked to the {at[who]}.']))
    qa = [(f'Where is {w}?', f'{w} is in the {at[w]}.', f'{w} was last in the {at[w]}.') for w in people]
    for i in items:
        if i in holder:
            w = holder[i]
            qa.append((f'Where is the {i}?', f'The {i} is in the {at[w]}.', f'{w} has the {i}. {w} is in the {at[w]}.'))
            qa.append((f'Who has the {i}?', f'{w} has the {i}.', f'{w} took the {i} and still has it.'))
        elif i in place:
            qa.append((f'Where is the {i}?', f'The {i} is in the {place[i]}.', f'The {i} was left in the {place[i]}.'))
    return ' '.join(lines), qa


DAYS = 'Monday Tuesday Wednesday Thursday Friday Saturday Sunday'.split()
PARTS = ['morning', 'afternoon', 'evening', 'night']
TOWNS = 'Paris London Rome Berlin Madrid Vienna Dublin Oslo Lisbon Athens Cairo Tokyo Boston Chicago Prague Warsaw Geneva Naples Milan Lyon'.split()
COLOURS = 'red blue green yellow black white brown grey golden silver pink purple'.split()
FOODS = 'bread cheese soup rice fish cake milk honey plums nuts apples pears butter salt'.split()
BEASTS = 'dog cat horse cow goat duck hen fox wolf bear mouse bird rabbit'.split()
NOTES = ['On {d} {n} went to the {r} with {t}.', '{n} has a {c} {b} and {k} {f}.', 'The {i} is in the {r}, under the {c} {j}.', 'The code of the {c} door is {code}.', '{n} gave {t} to {m}.',
         'Please bring {f}, {g} and {h} to {n} on {d}.', 'The train to {y} leaves at {k} in the {p}.', '{n} lives in {y}, in a {c} house near the {r}.', 'Do not tell {n} that {m} has {t}.',
         '{n} will come on {d} at {k} in the {p}.', '"I have lost {t}," said {n}.', '{m} found {t} behind the {r}.', 'The {b} of {n} is {c} and eats only {f}.', 'There are {k} {c} boxes in the {r}.',
         '{n} must pay {k} coins to {m} before {d}.', 'The key of the {r} lies behind the {c} {i}.', 'When the bell rings, {n} and {m} meet at the {r}.', 'Ask {n} for {t} and take it to {y}.',
         '{n} likes {f}, but {m} likes {g}.', 'The new {i} of {m} cost {k} coins.', 'In {y} {n} bought {t} and a {c} {j}.', 'If it rains on {d}, wait for {m} in the {r}.', 'Nobody but {n} knows where {t} is.',
         'A {c} {b} sat by the {r} and looked at {m}.', 'Write to {m} in {y} before the {p} of {d}.', '{n} took the {i} from the {r} and put it into a {c} {j}.']


def note(r):
    """Three to six sentences with facts that nothing foretells: a passage to be kept and given back word for word.  r: random.Random"""
    out = []
    for form in r.sample(NOTES, r.randint(3, 6)):
        n, m = r.sample(NAMES, 2)
        i, j = r.sample(ITEMS, 2)
        f, g, h = r.sample(FOODS, 3)
        out.append(form.format(d=r.choice(DAYS), n=n, m=m, r=r.choice(ROOMS), t=r.choice(THINGS), c=r.choice(COLOURS), b=r.choice(BEASTS), k=r.randint(2, 60), f=f, g=g, h=h, i=i, j=j, y=r.choice(TOWNS), p=r.choice(PARTS),
                               code=r.randint(1000, 9999)))
    return ' '.join(out)
