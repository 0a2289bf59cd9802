"""What is right, known before anything is asked.

The sim engine's token after a prefix is a function of all ids before it (and of the seed, where one draws), so the
right answer of a request is computed here from its prompt alone, by the formula of engine/sim.h restated: no process
under test is asked. For the CPU engine it is what the same cluster said while nothing disturbed it.

A `Right` is an answer: for each choice its text, its finish reason and, where they were asked for, its logprobs.
"""
import dataclasses

MASK = (1 << 64) - 1
START = 0x6a09e667f3bcc908
FIRST_ID, N_PLAIN = 3, 94
HALF = -0.6931472  # the log of the probability that the sim engine claims


@dataclasses.dataclass
class Choice:
    text: str
    finish: str
    tokens: list = None      # texts of the tokens, where logprobs were asked for
    logprobs: list = None    # their logprobs
    top: list = None         # {text: logprob} of each position


@dataclasses.dataclass
class Right:
    choices: list
    prompt_tokens: int
    completion_tokens: int


def prefix_of(ids, prefix=START):
    for one in ids:
        z = (prefix ^ one) * 0x9e3779b97f4a7c15 & MASK
        prefix = z ^ (z >> 29) ^ (z << 31 & MASK)
    return prefix


def sim_ids(prompt, n, vocab, seed=None):
    """The n ids that follow; seed: of a draw at a temperature above 0."""
    n_plain = N_PLAIN if vocab > FIRST_ID + N_PLAIN else vocab - FIRST_ID
    prefix, ids = prefix_of(prompt), []
    for _ in range(n):
        drawn = prefix if seed is None else prefix ^ (seed * 0xd1342543de82ef95 & MASK)
        z = (drawn ^ (drawn >> 32)) * 0xbf58476d1ce4e5b9 & MASK
        ids.append(FIRST_ID + (z >> 33) % n_plain)
        prefix = prefix_of(ids[-1:], prefix)
    return ids


def sim_right(prompt, n, letters, vocab, seed=None, n_choices=1, want_logprobs=False, stop=None):
    """letters: {id: text} of the plain ids."""
    ids = sim_ids(prompt, n, vocab, seed)
    tokens = [letters[one] for one in ids]
    text, finish, used = "".join(tokens), "length", n
    if stop is not None and stop in text:
        at = text.index(stop)
        text, finish, used = text[:at], "stop", at + len(stop)
    choice = Choice(text, finish)
    if want_logprobs:
        choice.tokens, choice.logprobs = tokens[:used], [HALF] * used  # those of the stop string too
    return Right([choice] * n_choices, len(prompt), used * n_choices)


def differences(found, right, whole):
    """(tokens of the text that are wrong, what else is). found: a Right as it was received. whole: the answer came to
    its end; otherwise what was shown must be how the right one begins."""
    wrong, other = 0, []
    if len(found.choices) != len(right.choices):
        other.append(f"{len(found.choices)} choices, not {len(right.choices)}")
    for i, (has, wants) in enumerate(zip(found.choices, right.choices)):
        if has.tokens is not None and wants.tokens is not None:
            wrong += count_wrong(has.tokens, wants.tokens, whole)
            n = len(has.tokens)
            if not close(has.logprobs, wants.logprobs[:n]):
                other.append(f"choice {i}: logprobs {has.logprobs} not {wants.logprobs[:n]}")
            if wants.top is not None and not all(close_maps(a, b) for a, b in zip(has.top, wants.top)):
                other.append(f"choice {i}: top logprobs differ")
        n_wrong = count_wrong(has.text, wants.text, whole)
        if n_wrong and not wrong:
            wrong += n_wrong
        if whole and has.finish != wants.finish:
            other.append(f"choice {i}: finish {has.finish}, not {wants.finish}")
    if whole and (found.prompt_tokens, found.completion_tokens) != (right.prompt_tokens, right.completion_tokens):
        other.append(f"usage {found.prompt_tokens}+{found.completion_tokens}, not "
                     f"{right.prompt_tokens}+{right.completion_tokens}")
    return wrong, other


def count_wrong(has, wants, whole):
    wrong = sum(a != b for a, b in zip(has, wants)) + max(0, len(has) - len(wants))
    return wrong + (max(0, len(wants) - len(has)) if whole else 0)


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) < 1e-5 for x, y in zip(a, b))


def close_maps(a, b):
    return a.keys() == b.keys() and close(list(a.values()), [b[key] for key in a])
