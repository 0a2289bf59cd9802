#!/usr/bin/env python3
"""check_openai_schema.py API_SAMPLES MODEL_FOLDER: rendered answers against openai_schema.json.

A validator of the keywords that the schema uses stands below, so that nothing need be installed;
where `jsonschema` is, it judges too, and where `openai` is, so do the types of that SDK. Then the
validator itself is tried: every sample is judged again with each required member taken out, and each
time must fail.
"""
import copy
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TYPES = {"object": dict, "array": list, "string": str, "null": type(None)}
KNOWN = {"$ref", "$comment", "type", "enum", "anyOf", "required", "properties", "additionalProperties", "items",
         "minItems", "minLength", "minimum", "maximum"}


def has_type(value, name):
    if name == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def breaches(value, schema, defs, path="$"):
    """Yields what is wrong with value. Raises for a keyword that is not understood."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        yield from breaches(value, defs[schema["$ref"].rsplit("/", 1)[1]], defs, path)
    if "anyOf" in schema and all(any(breaches(value, s, defs, path)) for s in schema["anyOf"]):
        yield f"{path}: fits none of {len(schema['anyOf'])}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(has_type(value, name) for name in names):
        yield f"{path}: {value!r} is not {' or '.join(names)}"
    if isinstance(value, dict):
        for key in schema.get("required", []):
            if key not in value:
                yield f"{path}: {key} is missing"
        others = schema.get("additionalProperties", {})
        for key, member in value.items():
            if key in schema.get("properties", {}):
                yield from breaches(member, schema["properties"][key], defs, f"{path}.{key}")
            elif others is False:
                yield f"{path}: {key} is not known"
            else:
                yield from breaches(member, others, defs, f"{path}.{key}")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{path}: too few"
        for i, item in enumerate(value):
            yield from breaches(item, schema.get("items", {}), defs, f"{path}.{i}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        yield f"{path}: too short"
    if has_type(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{path}: {value} is out of range"


def without_each_member(value, schema, defs):
    """Yields copies of value that lack one required member, wherever it stands."""
    def walk(at, its_schema, take):
        if "$ref" in its_schema:
            yield from walk(at, defs[its_schema["$ref"].rsplit("/", 1)[1]], take)
        for other in its_schema.get("anyOf", []):
            if not any(breaches(at, other, defs)):
                yield from walk(at, other, take)
        if isinstance(at, dict):
            for key in its_schema.get("required", []):
                yield take + [key]
            for key, member in at.items():
                yield from walk(member, its_schema.get("properties", {}).get(key, {}), take + [key])
        if isinstance(at, list):
            for i, item in enumerate(at):
                yield from walk(item, its_schema.get("items", {}), take + [i])
    for path in walk(value, schema, []):
        broken = copy.deepcopy(value)
        at = broken
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]
        yield path, broken


def no_twins(pairs):
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key comes twice: {keys}"
    return dict(pairs)


def sdk_types():
    try:
        from openai.types import Completion, Model
        from openai.types.chat import ChatCompletion, ChatCompletionChunk
    except ImportError:
        return {}
    return {"Chat": ChatCompletion, "ChatChunk": ChatCompletionChunk, "ChatChunkWithUsage": ChatCompletionChunk,
            "Completion": Completion, "Model": Model}


def main():
    program, model = sys.argv[1:]
    schema = json.load(open(os.path.join(HERE, "openai_schema.json")))
    defs = schema["$defs"]
    done = subprocess.run([program, model], stdout=subprocess.PIPE, check=True)
    try:
        import jsonschema
    except ImportError:
        jsonschema = None
    sdk = sdk_types()
    wrong, n_samples, n_broken, n_sdk, seen = 0, 0, 0, 0, set()
    for line in done.stdout.decode("utf-8").splitlines():
        name, text = line.split("\t", 1)
        sample = json.loads(text, object_pairs_hook=no_twins)
        found = list(breaches(sample, defs[name], defs))
        if jsonschema is not None:
            whole = {"$defs": defs, **defs[name]}
            found += [e.message for e in jsonschema.Draft202012Validator(whole).iter_errors(sample)]
        if name in sdk:
            try:
                sdk[name].model_validate(sample, strict=True)
                n_sdk += 1
            except ValueError as error:
                found.append(f"openai: {error}")
        for breach in found:
            print(f"{name}: {breach}\n  {text[:300]}")
            wrong += 1
        for path, broken in without_each_member(sample, defs[name], defs):
            n_broken += 1
            if not any(breaches(broken, defs[name], defs)):
                print(f"{name}: a sample without {path} passed")
                wrong += 1
        n_samples += 1
        seen.add(name)
    unseen = {name for name in defs if name[0].isupper()} - seen
    if unseen:
        print(f"no sample of {unseen}")
        wrong += 1
    print(f"{n_samples} samples of {len(seen)} shapes, {n_broken} broken copies refused; jsonschema "
          f"{'judged too' if jsonschema else 'is not installed'}, openai's types judged {n_sdk}; {wrong} wrong")
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
