"""Checkpoints that are broken: every one is refused at once by the programs themselves, in a line that says what and
where. What the loader does with each single field is tested in tests/model."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

import kit
from kit import check, need

suite = kit.Suite()
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


class Toys:
    """Copies of one small random checkpoint, each to be broken in its own way."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="cases-")
        self.good = os.path.join(self.folder, "good")
        subprocess.run([sys.executable, os.path.join(kit.TOP, "scripts", "make-toy"), "--out", self.good,
                        "--layers", "0,4,128", "--experts", "4", "--top-k", "2", "--hidden", "128", "--heads", "2",
                        "--width", "64"], check=True, capture_output=True, timeout=60)
        self.n = 0
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    def copy(self):
        self.n += 1
        path = os.path.join(self.folder, f"copy-{self.n}")
        shutil.copytree(self.good, path)
        return path


def start(build, model, daemon=True):
    """(exit code, what it said) of a node that is to open the checkpoint; None if it runs."""
    program = os.path.join(build, "decode", "baton-decode") if daemon else os.path.join(build, "eval", "baton-eval")
    argv = [program, *(["--pages", "8"] if daemon else ["generate"]), "--model", model]
    return kit.run_for(argv, 2.5 if daemon else 30, b"" if daemon else b'{"tokens":[5,6],"n":2}\n')


def refused(build, what, model, *parts, daemon=False):
    code, said = start(build, model, daemon)
    need(code not in (None, 0), f"{what}: it was not refused (exit {code})", said)
    need(code > 0, f"{what}: it died of signal {code and -code}", said)
    need("Sanitizer" not in said and "runtime error" not in said, what, said)
    for part in parts:
        need(part in said, f"{what}: {part!r} is not in what it said", said)


def edit(path, change):
    """Rewrites a JSON file by what change(object) returns."""
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(change(value), file)


def weight_map(model):
    with open(os.path.join(model, INDEX), encoding="utf-8") as file:
        return json.load(file)["weight_map"]


def cut(model, shard, n):
    path = os.path.join(model, shard)
    os.truncate(path, os.path.getsize(path) - n)


@suite.case("CKPT-02")
def shards_cut_short(build):
    with Toys() as toys:
        code, said = start(build, toys.good, daemon=False)
        check(f"the whole checkpoint ({said:.300})", code, 0)
        for n in (1, 4096, 100_000):
            for shard in SHARDS if n == 1 else SHARDS[1:2]:
                model = toys.copy()
                cut(model, shard, n)
                refused(build, f"{shard} cut by {n}", model, shard, f"{n} bytes short")
        model = toys.copy()
        cut(model, SHARDS[2], 1)
        refused(build, "a node with a cut shard", model, SHARDS[2], "1 bytes short", daemon=True)
        model = toys.copy()
        size = os.path.getsize(os.path.join(model, SHARDS[0]))
        with open(os.path.join(model, SHARDS[0]), "w", encoding="ascii") as file:
            file.write(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize {size}\n")
        refused(build, "a Git LFS pointer", model, SHARDS[0], "LFS")
        model = toys.copy()
        os.truncate(os.path.join(model, SHARDS[0]), 0)
        refused(build, "an empty shard", model, SHARDS[0])
        model = toys.copy()
        with open(os.path.join(model, SHARDS[1]), "ab") as file:
            file.write(b"\0" * 4096)
        refused(build, "bytes behind the last tensor", model, SHARDS[1])


def swap_shards(index):
    names = {SHARDS[0]: SHARDS[1], SHARDS[1]: SHARDS[0]}
    index["weight_map"] = {tensor: names.get(shard, shard) for tensor, shard in index["weight_map"].items()}
    return index


def renamed_in_index(index, old, new):
    index["weight_map"] = {tensor: new if shard == old else shard for tensor, shard in index["weight_map"].items()}
    return index


def with_ghost(index, name="layers.0.attn.ghost.weight"):
    index["weight_map"][name] = SHARDS[0]
    return index


def without_tensor(index, name):
    del index["weight_map"][name]
    return index


@suite.case("CKPT-03")
def indexes_and_configs(build):
    with Toys() as toys:
        tensors = weight_map(toys.good)
        of_layer_1 = next(name for name in tensors if name.startswith("layers.1.attn.wq_a"))
        outside = os.path.join(toys.folder, "outside.safetensors")
        shutil.copy(os.path.join(toys.good, SHARDS[0]), outside)
        for what, change, parts in (
                ("the index omits a tensor", lambda i: without_tensor(i, of_layer_1), [of_layer_1]),
                ("the index names a ghost", with_ghost, ["layers.0.attn.ghost.weight", SHARDS[0]]),
                ("two shards swapped", swap_shards, ["model-0000"]),
                ("a path outside the folder", lambda i: renamed_in_index(i, SHARDS[0], "../outside.safetensors"),
                 ["../outside.safetensors"]),
                ("an absolute path", lambda i: renamed_in_index(i, SHARDS[0], outside), [outside]),
                ("a device", lambda i: renamed_in_index(i, SHARDS[0], "/dev/zero"), ["/dev/zero"]),
                ("an absent shard", lambda i: renamed_in_index(i, SHARDS[2], "model-9.safetensors"),
                 ["model-9.safetensors"]),
                ("no object", lambda i: [i], [INDEX]),
                ("no weight map", lambda i: {}, [INDEX]),
                ("an empty weight map", lambda i: {"weight_map": {}}, []),
                ("a shard that is a number", lambda i: renamed_in_index(i, SHARDS[0], 1), [INDEX])):
            model = toys.copy()
            edit(os.path.join(model, INDEX), change)
            refused(build, what, model, *parts)
        for what, content in (("an empty index", b""), ("no JSON", b"{\"weight_map\": {"), ("bytes", os.urandom(4096)),
                              ("nested", b"[" * 100_000)):
            model = toys.copy()
            with open(os.path.join(model, INDEX), "wb") as file:
                file.write(content)
            refused(build, what, model, INDEX)

        model = toys.copy()
        os.unlink(os.path.join(model, SHARDS[1]))
        refused(build, "an absent shard", model, SHARDS[1], daemon=True)
        os.mkfifo(os.path.join(model, SHARDS[1]))
        refused(build, "a fifo for a shard", model, SHARDS[1])
        os.unlink(os.path.join(model, SHARDS[1]))
        os.mkdir(os.path.join(model, SHARDS[1]))
        refused(build, "a folder for a shard", model, SHARDS[1])
        model = toys.copy()
        with open(os.path.join(model, SHARDS[0]), "r+b") as file:
            file.write(struct.pack("<Q", 1 << 62))
        refused(build, "a header as long as no file", model, SHARDS[0])

        for field, value, parts in (("num_hidden_layers", 2, []), ("num_hidden_layers", 4, []),
                                    ("n_routed_experts", 5, ["layers.0.ffn.gate.weight"]),
                                    ("n_routed_experts", 3, []), ("vocab_size", 321, ["embed.weight"]),
                                    ("vocab_size", 319, ["embed.weight"]), ("hidden_size", 256, []),
                                    ("num_attention_heads", 4, []), ("vocab_size", 0, ["vocab_size"]),
                                    ("vocab_size", -1, ["vocab_size"]), ("vocab_size", "320", ["vocab_size"]),
                                    ("vocab_size", 1 << 40, ["vocab_size"])):
            model = toys.copy()
            edit(os.path.join(model, "config.json"), lambda c, f=field, v=value: {**c, f: v})
            refused(build, f"config.json with {field} {value}", model, *parts)
        model = toys.copy()
        os.unlink(os.path.join(model, "config.json"))
        refused(build, "no config.json", model, "config.json")

        # A second checkpoint in the folder, under names that the index does not have, changes nothing.
        model = toys.copy()
        wanted = start(build, toys.good, daemon=False)
        for i, shard in enumerate(SHARDS):
            shutil.copy(os.path.join(toys.good, SHARDS[2 - i]), os.path.join(model, f"other-{shard}"))
        shutil.copy(os.path.join(toys.good, SHARDS[0]), os.path.join(model, "model.safetensors"))
        found = start(build, model, daemon=False)
        check("exit with stray files", found[0], 0)
        ids = [line for line in found[1].splitlines() if line.startswith("{")]
        check("ids with stray files", ids, [line for line in wanted[1].splitlines() if line.startswith("{")])


def token_added(tokenizer):
    tokenizer["model"]["vocab"]["surely-new"] = max(tokenizer["model"]["vocab"].values()) + 1000
    return tokenizer


def router_refused(build, what, model, *parts):
    port, join_port = kit.ports.free(2)
    argv = [os.path.join(build, "router", "baton-router"), "--model", model, "--http-port", str(port), "--grpc-port",
            str(join_port)]
    code, said = kit.run_for(argv, 5)
    need(code is not None, f"{what}: the router runs with it", said)
    need(code > 0, f"{what}: exit {code}", said)
    for part in parts:
        need(part in said, f"{what}: {part!r} is not in what it said", said)


@suite.case("CKPT-03-tokenizer")
def tokenizer_and_config_disagree(build):
    """The router is the one that reads tokenizer.json."""
    with Toys() as toys:
        for what, change, parts in (
                ("more entries than config.json's vocabulary", token_added, ["tokenizer.json"]),
                ("not a tokenizer", lambda t: [], ["tokenizer.json"]),
                ("no model", lambda t: {"added_tokens": []}, ["tokenizer.json"])):
            model = toys.copy()
            edit(os.path.join(model, "tokenizer.json"), change)
            router_refused(build, what, model, *parts)
        model = toys.copy()
        os.unlink(os.path.join(model, "tokenizer.json"))
        router_refused(build, "no tokenizer", model, "tokenizer.json")
        model = toys.copy()
        os.unlink(os.path.join(model, "encoding.json"))
        router_refused(build, "no prompt texts", model, "encoding.json")


def cluster_of_a_copy(build):
    folder = tempfile.mkdtemp(prefix="cases-")
    model = os.path.join(folder, "model")
    shutil.copytree(kit.TINY, model)
    return folder, model


@suite.case("CKPT-02-running")
def truncated_while_it_runs(build):
    """The files shrink to nothing under running nodes: no signal, the same answers."""
    folder, model = cluster_of_a_copy(build)
    try:
        with kit.Cluster(build, "split", engine="model", model=model) as cluster:
            ask = {"max_tokens": 6, "temperature": 0}
            before = cluster.good_chat("Count to three.", **ask)["choices"]
            baseline = cluster.baseline()
            for name in os.listdir(model):
                if name.endswith(".safetensors"):
                    os.truncate(os.path.join(model, name), 0)
            check("the answer afterwards", cluster.good_chat("Count to three.", **ask)["choices"], before)
            cluster.good_chat("Another prompt, so that other rows and experts are read.", **ask)
            baseline.check()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    suite.main()
