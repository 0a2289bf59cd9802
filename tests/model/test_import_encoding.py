#!/usr/bin/env python3
"""scripts/import-encoding on encoding files made here, with texts of our own in the place of the checkpoint's.

usage: test_import_encoding.py SCRIPT
"""
import hashlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(sys.argv.pop(1))
loader = importlib.machinery.SourceFileLoader('import_encoding', str(SCRIPT))
module = importlib.util.module_from_spec(importlib.util.spec_from_loader('import_encoding', loader))
sys.dont_write_bytecode = True
loader.exec_module(module)

PREFIX, SUFFIX, FIRST, SECOND = '## T\n<｜DSML｜x name="$N">\n{"a": 1}\n', '\n\nend ü\n', 'think hard\n\n', 'think harder — much\n\n'
SOURCE = '''
import os
raise SystemExit('must not be run')
dsml_token = "｜DSML｜"
TOOLS = """## T
<{dsml_token}x name="$N">
{{"a": 1}}
{tool_schemas}

end ü
"""
RESPONSE = "## Response Format:\\n\\nFollow this schema:\\n{schema}"
EFFORT = (
    "think "
    "hard\\n\\n")
'''


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


class Import(unittest.TestCase):
    def setUp(self):
        module.TEXTS = {'tools_prefix': sha(PREFIX), 'tools_suffix': sha(SUFFIX), 'effort_first': sha(FIRST), 'effort_second': sha(SECOND)}

    def test_preview(self):
        texts = module.read_texts(SOURCE, None)
        self.assertEqual(texts, {'release': 'preview', 'tools_prefix': PREFIX, 'tools_suffix': SUFFIX,
                                 'effort': {'none': '', 'low': '', 'high': '', 'max': FIRST},
                                 'response_format_heading': '## Response Format:', 'response_format_instruction': 'Follow this schema:'})

    def test_official(self):
        texts = module.read_texts(SOURCE + f'OTHER = {SECOND[:5]!r} + {SECOND[5:]!r}\n', None)
        self.assertEqual(texts['release'], 'official')
        self.assertEqual(texts['effort'], {'none': '', 'low': '', 'high': FIRST, 'max': SECOND})

    def test_f_string(self):
        source = SOURCE.replace('TOOLS = """', 'TOOLS = f"""')
        self.assertEqual(module.read_texts(source, None)['tools_prefix'], PREFIX)

    def test_refusals(self):
        for change, word in ((('## T', '## U'), 'tools_prefix'), (('end ü', 'end'), 'tools_suffix'), (('hard', 'soft'), 'effort_first'),
                             (('## Response Format:', '## Format:'), '--instruction'), (('import os', 'import ('), 'Python')):
            with self.assertRaises(module.ImportFailed) as caught:
                module.read_texts(SOURCE.replace(*change), None)
            self.assertIn(word, str(caught.exception))
        self.assertEqual(module.read_texts(SOURCE.replace('## Response', '##'), 'given')['response_format_instruction'], 'given')

    def test_command(self):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, 'model')
            for source, word in ((None, 'encoding_dsv4.py'), ('x = 1\n', 'tools_prefix'), (b'\xff', 'utf-8')):
                if source is not None:
                    (model / 'encoding').mkdir(parents=True, exist_ok=True)
                    (model / 'encoding' / 'encoding_dsv4.py').write_bytes(source if isinstance(source, bytes) else source.encode())
                done = subprocess.run([SCRIPT, model, '--out', Path(folder, 'out')], capture_output=True, text=True)
                self.assertEqual(done.returncode, 1)
                self.assertIn(word, done.stderr)
                self.assertNotIn('Traceback', done.stderr)
                self.assertFalse(Path(folder, 'out').exists())
            copy = Path(folder, 'script')       # the same program, with the hashes of the texts made here
            text = SCRIPT.read_text()
            for name, value in (('c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c', PREFIX), ('690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7', SUFFIX),
                                ('f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7', FIRST)):
                self.assertIn(name, text)
                text = text.replace(name, sha(value))
            copy.write_text(text)
            (model / 'encoding' / 'encoding_dsv4.py').write_text(SOURCE)
            done = subprocess.run([sys.executable, copy, model, '--out', Path(folder, 'out')], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            self.assertEqual(json.loads(Path(folder, 'out', 'encoding.json').read_text())['tools_prefix'], PREFIX)


if __name__ == '__main__':
    unittest.main()
