"""Taught abilities whose answers can be checked exactly, as chat documents: copying from far back, lookups, counting, sorting, small sums, tool calls,
JSON answers, definitions, stories, continuations.  Everything comes from a seeded random.Random."""
import re

import chatformat as cf
from stories import NAMES, note, story, world

COLOURS = 'red blue green yellow black white brown grey golden silver pink purple'.split()
FOODS = 'bread cheese apple pear soup rice fish cake milk honey egg plum nut'.split()
ANIMALS = 'dog cat horse cow sheep goat duck hen fox wolf bear mouse bird fish rabbit'.split()
CITIES = 'Paris London Rome Berlin Madrid Vienna Dublin Oslo Lisbon Athens Cairo Tokyo Boston Chicago Prague Warsaw Geneva Naples Milan Lyon'.split()
ABILITIES = 'count_range lookup table order sums repeat tool far_fact far_copy far_note'.split()
NUMBER = 'zero one two three four five six seven eight nine ten eleven twelve'.split()
SYSTEMS = [None] * 6 + ['You are a helpful assistant.', 'You are baton-tiny, a small language model.', 'Answer briefly.', 'Answer in plain English.', 'You are a friendly teacher.']


def article(w):
    return ('an ' if w[0] in 'aeiou' else 'a ') + w


class Maker:
    """Material: words (common words), qa (question, answer), examples (word -> sentences), paragraphs (running prose)."""
    def __init__(s, rnd, words, qa, examples, paragraphs, quiz):
        s.r, s.words, s.qa, s.examples, s.paragraphs, s.quiz = rnd, words, qa, examples, paragraphs, quiz
        s.keys = sorted(examples)
        s.good = [p for p in paragraphs if 120 <= len(p) <= 420]
        s.long = [p for p in paragraphs if 350 <= len(p) <= 1200]

    # ---- single turns: (user, reasoning, answer)
    def small_talk(s):
        r = s.r
        return r.choice([
            (r.choice(['Hello!', 'Hi', 'Hello', 'Good morning.', 'Hey there']), 'The user greets me. I greet back and offer help.', r.choice(['Hello! How can I help you?', 'Hello! What can I do for you?'])),
            (r.choice(['Who are you?', 'What are you?', 'What is your name?']), 'The user asks who I am.', 'I am baton-tiny, a very small language model. I was trained to test the baton server.'),
            (r.choice(['What can you do?', 'Can you help me?', 'What are you good at?']), 'The user asks what I can do. I name a few things.', 'I can tell short stories, copy text, count, look things up in your message and call tools. I am small, so please check what I say.'),
            (r.choice(['Thank you!', 'Thanks.', 'Thank you very much.']), 'The user thanks me.', 'You are welcome!'),
            (r.choice(['Goodbye.', 'Bye!', 'See you later.']), 'The user says goodbye.', 'Goodbye! Have a good day.'),
            (r.choice(['How are you?', 'How are you today?']), 'The user asks how I am.', 'I am well, thank you. How can I help you?')])

    def tell_story(s):
        r = s.r
        kind = r.choice([None, 'girl', 'boy', 'fox', 'mouse', 'farmer', 'bear', 'rabbit', 'fisherman', 'queen', 'cat', 'owl', 'duck'])
        if kind is None:
            return r.choice(['Tell me a story.', 'Please tell me a short story.', 'Can you tell me a story?', 'Write a short story.']), 'The user wants a story. I tell a short one with a happy end.', story(r)
        q = r.choice(['Tell me a story about {}.', 'Write a short story about {}.', 'Can you tell me a story about {}?']).format(article(kind))
        return q, f'The user wants a story about {article(kind)}. I tell a short one with a happy end.', story(r, kind)

    def definition(s):
        q, a = s.r.choice(s.qa)
        w = re.search('"(.+?)"', q).group(1)
        q = s.r.choice([q, q, f'What is the meaning of "{w}"?', f'Please explain the word "{w}".', f'Define "{w}".'])
        return q, f'The user asks what "{w}" means. I give a short definition.', a

    def sentence(s):
        w = s.r.choice(s.keys)
        q = s.r.choice(['Write a sentence with the word "{}".', 'Use the word "{}" in a sentence.', 'Give me an example of how to use "{}".']).format(w)
        return q, f'I need one sentence that has the word "{w}" in it.', s.r.choice(s.examples[w])

    def continuation(s):
        p = s.r.choice(s.long)
        parts = re.split(r'(?<=[.!?]) ', p)
        k = s.r.randint(1, max(1, len(parts) // 2))
        a, b = ' '.join(parts[:k]), ' '.join(parts[k:k + 4])
        if not b or len(a) > 500:
            return s.sentence()
        return s.r.choice(['Continue this text: ', 'Continue: ', 'Go on with this text: ']) + a, 'I continue the text in the same style.', b

    def quiz_question(s):
        return s.r.choice(s.quiz)

    def count_words(s):
        r = s.r
        n = r.randint(2, 12)
        kind, pool = r.choice([('words', s.words), ('animals', ANIMALS), ('colours', COLOURS), ('names', NAMES), ('cities', CITIES)])
        items = [r.choice(pool) for _ in range(n)] if kind == 'words' else r.sample(pool, min(n, len(pool)))
        n = len(items)
        why = 'I count: ' + ', '.join(f'{i + 1} {w}' for i, w in enumerate(items)) + f'. That makes {n}.'
        return r.choice([f'How many {kind} are in this list? ', f'Count the {kind}: ', f'Count the {kind} in this list: ']) + ', '.join(items), why, f'There are {n} {kind}.'

    def count_same(s):
        r = s.r
        a, b = r.sample(s.words, 2)
        n = r.randint(1, 9)
        items = [a] * n + [b] * r.randint(1, 6) + r.sample(s.words, r.randint(0, 3))
        items = [w for w in items if w != a] + [a] * n
        r.shuffle(items)
        k, marks = 0, []
        for w in items:
            k += w == a
            marks.append(f'{w} {k}')
        return f'How many times does the word "{a}" appear here: {" ".join(items)}', 'I go through the list: ' + ', '.join(marks) + '.', f'The word "{a}" appears {n} time{"s" * (n > 1)}.'

    def count_range(s):
        r = s.r
        a = r.randint(0, 60)
        b = a + r.randint(2, 14)
        if r.random() < .3:
            return f'Count backwards from {b} to {a}.', f'I start at {b} and stop at {a}.', ', '.join(map(str, range(b, a - 1, -1)))
        return r.choice(['Count from {} to {}.', 'Please count from {} to {}.']).format(a, b), f'I start at {a} and stop at {b}.', ', '.join(map(str, range(a, b + 1)))

    def sums(s):
        r = s.r
        if r.random() < .5:
            a, b = r.randint(0, 60), r.randint(0, 39)
            q, c, op = ('What is {} plus {}?', a + b, 'plus')
        else:
            a = r.randint(0, 99)
            b = r.randint(0, a)
            q, c, op = ('What is {} minus {}?', a - b, 'minus')
        return r.choice([q, q.replace('What is', 'How much is')]).format(a, b), f'I need {a} {op} {b}. That is {c}.', f'{a} {op} {b} is {c}.'

    def order(s):
        r = s.r
        k = r.random()
        if k < .35:
            x = r.sample(range(100), r.randint(3, 7))
            return 'Sort these numbers: ' + ', '.join(map(str, x)), f'The smallest is {min(x)} and the largest is {max(x)}.', ', '.join(map(str, sorted(x)))
        x = r.sample(s.words, r.randint(2, 6))
        if k < .55:
            return 'Write these words in reverse order: ' + ', '.join(x), f'I start with "{x[-1]}" and end with "{x[0]}".', ', '.join(x[::-1])
        if k < .7:
            return 'What is the first word of this list? ' + ', '.join(x), f'The list starts with "{x[0]}".', f'The first word is "{x[0]}".'
        if k < .85:
            return 'What is the last word of this list? ' + ', '.join(x), f'The list ends with "{x[-1]}".', f'The last word is "{x[-1]}".'
        i = r.randint(1, len(x))
        return f'What is word number {i} of this list? ' + ', '.join(x), 'I count: ' + ', '.join(f'{j + 1} {w}' for j, w in enumerate(x[:i])) + '.', f'Word number {i} is "{x[i - 1]}".'

    def repeat(s):
        r = s.r
        t = ' '.join(r.choice(s.words) for _ in range(r.randint(2, 25))) if r.random() < .6 else r.choice(s.good)
        return r.choice(['Repeat after me: ', 'Repeat this: ', 'Say exactly this: ', 'Copy this text: ', 'Repeat this text word for word: ']) + t, 'I repeat the text without a change.', t

    def fact(s):
        """(statement, question, answer)"""
        r = s.r
        k = r.randrange(4)
        if k == 0:
            c, n = f'{r.choice(COLOURS)} {r.choice(["door", "box", "house", "room", "gate", "chest"])}', r.randint(1000, 9999)
            return f'The code of the {c} is {n}.', f'What is the code of the {c}?', f'The code of the {c} is {n}.'
        if k == 1:
            w, a, c = r.choice(NAMES), r.choice(COLOURS), r.choice(ANIMALS)
            return f'{w} has a {a} {c}.', f'What does {w} have?', f'{w} has a {a} {c}.'
        if k == 2:
            w, c = r.choice(NAMES), r.choice(CITIES)
            return f'{w} lives in {c}.', f'Where does {w} live?', f'{w} lives in {c}.'
        w, f = r.choice(NAMES), r.choice(FOODS)
        return f'{w} likes {f} best.', f'What does {w} like best?', f'{w} likes {f} best.'

    def facts(s, n):
        seen, out = set(), []
        while len(out) < n:
            f = s.fact()
            if f[1] not in seen:
                seen.add(f[1])
                out.append(f)
        return out

    def lookup(s):
        r = s.r
        fs = s.facts(r.randint(2, 9))
        st, q, a = r.choice(fs)
        return ' '.join(f[0] for f in fs) + r.choice([' ', '\n\n', '\n']) + q, f'The text says: {st}', a

    def table(s):
        r = s.r
        rows = {w: r.choice([str(r.randint(10, 999)), r.choice(s.words)]) for w in r.sample(s.words, r.randint(3, 12))}
        k = r.choice(list(rows))
        return '\n'.join(f'{a}: {b}' for a, b in rows.items()) + f'\n\nWhat stands after "{k}"?', f'I look for the line that starts with "{k}".', rows[k]

    def where(s):
        t, qa = world(s.r, s.r.randint(2, 12))
        q, a, why = s.r.choice(qa)
        return t + ' ' + q, why, a

    # ---- tools
    def tool(s):
        """(spec, request, name, arguments, result, reply)"""
        r = s.r
        k = r.randrange(8)
        P = lambda **kw: {'type': 'object', 'properties': {a: {'type': t, 'description': d} for a, (t, d) in kw.items()}, 'required': list(kw)}
        spec = lambda n, d, p: {'name': n, 'description': d, 'parameters': p}
        c, c2, n = r.choice(CITIES), r.choice(CITIES), r.randint(2, 400)
        if k == 0:
            w, t = r.choice(['sunny', 'rainy', 'cloudy', 'windy', 'cold', 'warm']), r.randint(-5, 35)
            return spec('get_weather', 'Get the weather of a city.', P(city=('string', 'Name of the city'))), r.choice([f'What is the weather in {c}?', f'How is the weather in {c} today?', f'Tell me the weather in {c}.']), 'get_weather', {'city': c}, \
                {'weather': w, 'temperature': t}, f'The weather in {c} is {w}, with {t} degrees.'
        if k == 1:
            t = f'{r.randint(0, 23):02d}:{r.randint(0, 59):02d}'
            return spec('get_time', 'Get the time in a city.', P(city=('string', 'Name of the city'))), r.choice([f'What time is it in {c}?', f'Tell me the time in {c}.']), 'get_time', {'city': c}, {'time': t}, f'It is {t} in {c}.'
        if k == 2:
            m = r.randint(2, 99)
            return spec('multiply', 'Multiply two numbers.', P(a=('number', 'First number'), b=('number', 'Second number'))), r.choice([f'What is {n} times {m}?', f'Multiply {n} by {m}.']), 'multiply', {'a': n, 'b': m}, {'result': n * m}, f'{n} times {m} is {n * m}.'
        if k == 3:
            return spec('find_train', 'Find a train between two cities.', P(start=('string', 'City of departure'), end=('string', 'City of arrival'))), r.choice([f'Find a train from {c} to {c2}.', f'I want to go from {c} to {c2} by train.']), 'find_train', {'start': c, 'end': c2}, \
                {'train': n, 'platform': r.randint(1, 12)}, f'Train {n} goes from {c} to {c2}.'
        if k == 4:
            w = r.choice(NAMES)
            tel = ' '.join(str(r.randint(100, 999)) for _ in range(2))
            return spec('find_phone', 'Find the phone number of a person.', P(name=('string', 'Name of the person'))), r.choice([f'What is the phone number of {w}?', f'I need the number of {w}.']), 'find_phone', {'name': w}, {'phone': tel}, f'The phone number of {w} is {tel}.'
        if k == 5:
            w = r.choice(NAMES)
            t = ' '.join(r.choice(s.words) for _ in range(r.randint(2, 6)))
            return spec('send_message', 'Send a message to a person.', P(name=('string', 'Who gets it'), text=('string', 'The message'))), r.choice([f'Send this message to {w}: {t}', f'Tell {w} this: {t}']), 'send_message', {'name': w, 'text': t}, {'sent': True}, f'I have sent the message to {w}.'
        if k == 6:
            m = r.randint(1, 60)
            return spec('set_timer', 'Set a timer.', P(minutes=('integer', 'Length in minutes'))), r.choice([f'Set a timer for {m} minutes.', f'Wake me in {m} minutes.']), 'set_timer', {'minutes': m}, {'ok': True}, f'The timer is set for {m} minutes.'
        w, x = r.sample(s.words, 2)
        f, v = r.choice(['find', 'get', 'show', 'read', 'check', 'search']), r.choice([r.randint(1, 999), r.choice(s.words)])
        return spec(f'{f}_{w}', f'{f.capitalize()} the {w} of a thing.', P(**{x: ('string', 'The thing')})), f'{f.capitalize()} the {w} of {c}.', f'{f}_{w}', {x: c}, {w: v}, f'The {w} of {c} is {v}.'

    def tool_document(s, thinking):
        r = s.r
        known = [s.tool() for _ in range(r.randint(1, 4))]
        by = {t[0]['name']: t for t in known}
        tools = [t[0] for t in by.values()]
        turns = []
        for spec, ask, name, args, result, reply in r.sample(list(by.values()), 1 if len(by) < 2 or r.random() < .7 else 2):
            if r.random() < .12:
                turns.append(s.short_turn())
                continue
            turns.append((ask, f'I need the tool {name} for this.', cf.calls_block([(name, args)])))
            if r.random() < .75:
                turns.append((f'<tool_result>{cf.dumps(result)}</tool_result>', 'The tool has answered. I give the result.', reply))
        return cf.document(turns, system=r.choice(['', '', 'You are a helpful assistant.', 'You can use tools.']), tools=tools, thinking=thinking)

    def json_document(s, thinking):
        r = s.r
        w, age, c = r.choice(NAMES), r.randint(3, 90), r.choice(CITIES)
        every = {'name': (w, 'string'), 'age': (age, 'integer'), 'city': (c, 'string')}
        keys = r.sample(list(every), r.randint(1, 3))
        schema = {'type': 'object', 'properties': {k: {'type': every[k][1]} for k in keys}, 'required': keys}
        user = r.choice([f'{w} is {age} years old and lives in {c}.', f'{w} lives in {c} and is {age} years old.'])
        return cf.document([(user, 'I fill the fields of the schema.', cf.dumps({k: every[k][0] for k in keys}))], system=r.choice(['', 'You are a helpful assistant.']), schema=schema, thinking=thinking)

    def short_turn(s):
        kinds = (s.small_talk, 2), (s.tell_story, 6), (s.definition, 5), (s.sentence, 5), (s.continuation, 7), (s.quiz_question, 1), (s.count_words, 3), (s.count_same, 2), (s.count_range, 2), (s.sums, 3), \
            (s.order, 4), (s.repeat, 5), (s.lookup, 5), (s.table, 3), (s.where, 4)
        f, = s.r.choices([k for k, _ in kinds], [w for _, w in kinds])
        return f()

    def short_document(s):
        r = s.r
        thinking = r.random() < .4
        k = r.random()
        if k < .15:
            return s.tool_document(thinking)
        if k < .17:
            return s.json_document(thinking)
        turns = [s.short_turn() for _ in range(1 if r.random() < .65 else r.randint(2, 4))]
        return cf.document(turns, system=r.choice(SYSTEMS), thinking=thinking, effort_max=r.random() < .1)

    # ---- documents in which something must be found far back
    def passage(s, least=12):
        r = s.r
        k = r.random()
        return note(r) if k < .4 else ' '.join(r.choice(s.words) for _ in range(r.randint(least, 40))) if k < .7 else r.choice(s.good)

    def long_document(s, n_chars, paragraphs=None):
        """A text of about n_chars, with notes and facts strewn in, then questions about it."""
        r = s.r
        prose, size = [], 0
        src = paragraphs or s.paragraphs
        i = r.randrange(len(src))
        while size < n_chars:
            prose.append(src[i % len(src)])
            size += len(prose[-1]) + 2
            i += 1
        places = list(range(len(prose) + 1))
        put, asks = {}, []
        names = r.sample(NAMES, r.randint(2, 6))
        for w in names:
            t = s.passage()
            put.setdefault(r.choice(places), []).append(f'Note for {w}:\n{t}')        # on a line of its own, the first word is the same token in the answer
            asks.append((r.choice([f'Repeat the note for {w}.', f'Copy the note for {w} word for word.', f'What does the note for {w} say?']), f'I look for the note for {w} and copy it.', t))
        for st, q, a in s.facts(r.randint(1, 5)):
            put.setdefault(r.choice(places), []).append(st)
            asks.append((q, f'The text says: {st}', a))
        for _ in range(r.randint(1, 3)):
            p = r.choice(prose)
            head = ' '.join(p.split()[:6])
            if 100 < len(p) < 500:
                asks.append((f'Repeat the paragraph that begins with "{head}".', 'I look for the paragraph and copy it.', p))
        segments = [(r.choice(['Read this text.', 'Here is a text.', 'Please read this carefully.', 'Text:']) + '\n\n', 0)]
        for k in places:
            for x in put.get(k, []):
                segments.append((x + '\n\n', 0))
            if k < len(prose):
                segments.append((prose[k] + '\n\n', 0))                       # read in the rows of text
        r.shuffle(asks)
        asks = asks[:r.randint(2, 6)]
        first = (segments + [(asks[0][0], 0)], asks[0][1], asks[0][2])
        return cf.document([first] + asks[1:], system=r.choice(SYSTEMS), thinking=r.random() < .25)

    def copy_probe(s, filler, n_chars_after, kind):
        """For measuring: one note ("copy": 24 random words, "copy_text": running text, "copy_note": made-up facts), then about n_chars_after of filler, then the request.  Returns (prompt, answer)."""
        r = s.r
        w, other = r.sample(NAMES, 2)
        t = ' '.join(r.choice(s.words) for _ in range(24)) if kind == 'copy' else r.choice(s.good) if kind == 'copy_text' else note(r)
        i, size, fill = r.randrange(len(filler)), 0, []
        while size < n_chars_after:
            fill.append(filler[i % len(filler)][:max(200, n_chars_after - size)])
            size += len(fill[-1]) + 2
            i += 1
        user = f'Read this text.\n\n{filler[i % len(filler)]}\n\nNote for {w}:\n{t}\n\n' + '\n\n'.join(fill) + f'\n\nRepeat the note for {w}.'
        return cf.prompt_text(cf.document([(user, '', t)]))

    def ability(s, kind, filler):
        """A task with one right answer: dict(user, tools, answer) or, for a tool, dict(user, tools, call).  The far ones have some 2,000 tokens of filler
        between what is asked for and the question."""
        r = s.r
        if kind == 'tool':
            known = {t[0]['name']: t for t in (s.tool() for _ in range(r.randint(1, 3)))}
            _, user, name, arguments, _, _ = r.choice(list(known.values()))
            return dict(user=user, tools=[t[0] for t in known.values()], call=[name, arguments])
        if kind in ('count_range', 'lookup', 'table', 'order', 'sums', 'repeat'):
            user, _, answer = getattr(s, kind)()
            return dict(user=user, tools=[], answer=answer)
        i, size, fill = r.randrange(len(filler)), 0, []
        while size < 6700:
            fill.append(filler[i % len(filler)])
            size += len(fill[-1]) + 2
            i += 1
        if kind == 'far_fact':
            told, ask, answer = s.fact()
        else:
            w = r.choice(NAMES)
            answer = note(r) if kind == 'far_note' else r.choice([p for p in re.split(r'(?<=[.!?]) ', r.choice(s.good)) if len(p) > 40] or s.good)
            told, ask = f'Note for {w}:\n{answer}', f'Repeat the note for {w}.'
        return dict(user='\n\n'.join(['Read this text.', filler[i % len(filler)], told] + fill + [ask]), tools=[], answer=answer)
