#!/usr/bin/env python3
"""check_sim_script.py SIM-SCRIPT BATON-EVAL MODEL BATON-DECODE: the file that scripts/sim-script makes holds the ids of
its texts as the reference library encodes them (where it is installed), and a node takes it."""
import json
import subprocess
import sys
import tempfile

script, evaluate, model, decode = sys.argv[1:5]
TALK = [{"when": "weather in Oslo", "text": "It is raining, 4 \u00b0C.", "pause_ms": 20, "pauses": {"3": 500}},
        {"text": "I do not know.", "loop": True}]


def make(lines):
    return subprocess.run([sys.executable, script, "--model", model, "--eval", evaluate],
                          input="".join(json.dumps(line) + "\n" for line in lines), capture_output=True, text=True)


done = make(TALK)
assert done.returncode == 0, done.stderr
made = [json.loads(line) for line in done.stdout.splitlines()]
assert len(made) == 3, made  # "weather" and " weather", and the last
assert [m["ids"] for m in made[:2]] == [made[0]["ids"]] * 2 and made[0]["when_ids"] != made[1]["when_ids"]
assert made[0]["pause_ms"] == 20 and made[0]["pauses"] == {"3": 500} and "loop" not in made[0]
assert made[2] == {"ids": made[2]["ids"], "loop": True}
try:
    from tokenizers import Tokenizer
except ImportError:
    print("the reference library is not here: ids are not compared")
else:
    reference = Tokenizer.from_file(f"{model}/tokenizer.json")
    ids = [reference.encode(text, add_special_tokens=False).ids
           for text in ("weather in Oslo", " weather in Oslo", TALK[0]["text"], TALK[1]["text"])]
    assert [made[0]["when_ids"], made[1]["when_ids"], made[0]["ids"], made[2]["ids"]] == ids

for bad, word in (([{"when": "x"}], "text"), ([{"text": 3}], "text"), ([{"text": "x", "wen": "y"}], "wen"),
                  ([{"text": "x", "when": ""}], "when")):
    done = make(bad)
    assert done.returncode and word in done.stderr and not done.stdout, (bad, done.stderr)

with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    file.write("".join(json.dumps(m) + "\n" for m in made))
    file.flush()
    for vocabulary, is_taken in (("129280", True), ("128", False)):
        node = subprocess.Popen([decode, "--engine", "sim", "--script", file.name, "--sim-vocab", vocabulary,
                                 "--sim-page-bytes", "4096", "--sim-tail-bytes", "64"], stderr=subprocess.PIPE, text=True)
        said = ""
        for line in node.stderr:
            said += line
            if "gRPC on" in line:
                node.terminate()
                break
        code = node.wait(30)
        assert (code == 0) == is_taken, (vocabulary, code, said)
        assert is_taken or "vocab" in said or "id below 128" in said, said
