"""The V4 prompt encoding as training text: documents are lists of (text, learn) segments.

`learn` says whether the tokens of the segment count in the loss.  Segments end at special tokens or after a blank line, so that tokenising them one
by one gives the same ids as tokenising the whole.
"""
import json

BOS, EOS = '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>'
USER, ASSISTANT, THINK, UNTHINK, DSML = '<｜User｜>', '<｜Assistant｜>', '<think>', '</think>', '｜DSML｜'

# the bundled model's own prompt texts; written to encoding.json
TEXTS = {
    'release': 'tiny',
    'tools_prefix': '## Tools\n\nYou can call the tools listed below. To call one, write a block of this form:\n\n'
                    f'<{DSML}tool_calls>\n<{DSML}invoke name="NAME">\n<{DSML}parameter name="KEY" string="true|false">VALUE</{DSML}parameter>\n'
                    f'</{DSML}invoke>\n</{DSML}tool_calls>\n\nUse string="true" for plain text and string="false" for JSON. The tools are:\n\n',
    'tools_suffix': '\n\nCall a tool when the answer needs it. Otherwise answer directly.\n',
    'effort': {'none': '', 'low': '', 'high': '', 'max': 'Think step by step, as long as you need, before you answer.\n\n'},
    'response_format_heading': '## Response Format:',
    'response_format_instruction': 'Answer with one JSON value that fits this schema:',
}


def dumps(x):
    return json.dumps(x, ensure_ascii=False)


def tools_section(tools):
    return TEXTS['tools_prefix'] + '\n'.join(dumps(t) for t in tools) + TEXTS['tools_suffix']


def response_section(schema):
    return f"{TEXTS['response_format_heading']}\n\n{TEXTS['response_format_instruction']}\n{dumps(schema)}"


def calls_block(calls):
    out = [f'\n\n<{DSML}tool_calls>']
    for name, arguments in calls:
        out.append(f'<{DSML}invoke name="{name}">')
        for k, v in arguments.items():
            s = isinstance(v, str)
            out.append(f'<{DSML}parameter name="{k}" string="{"true" if s else "false"}">{v if s else dumps(v)}</{DSML}parameter>')
        if not arguments:
            out.append('')
        out.append(f'</{DSML}invoke>')
    return '\n'.join(out + [f'</{DSML}tool_calls>'])


def document(turns, system=None, tools=None, schema=None, thinking=False, effort_max=False):
    """turns: list of (user segments or text, reasoning, answer).  An answer may end with a calls block; the user text of a tool's result is
    written by the caller.  In thinking mode without tools the reasoning of all turns but the last is dropped, as the server does."""
    head = BOS + (TEXTS['effort']['max'] if thinking and effort_max else '')
    if system is not None or tools or schema:
        head += system or ''
        if tools:
            head += '\n\n' + tools_section(tools)
        if schema:
            head += '\n\n' + response_section(schema)
    segments = [(head, 0)]
    for n, (user, reasoning, answer) in enumerate(turns):
        user = [(user, 0)] if isinstance(user, str) else user
        keep = thinking and (tools or n == len(turns) - 1)
        segments.append((USER, 0))
        segments += user
        if keep:
            segments += [(ASSISTANT + THINK, 0), (reasoning + UNTHINK + answer + EOS, 1)]
        else:
            segments += [(ASSISTANT + UNTHINK, 0), (answer + EOS, 1)]
    return segments


def prompt_text(segments):
    """Everything before the last learned segment: what a server would send."""
    last = max(i for i, s in enumerate(segments) if s[1])
    return ''.join(t for t, _ in segments[:last]), segments[last][0]
