#!/usr/bin/env python3
"""with_litellm.py --url URL: chat, stream and errors through LiteLLM. Exit 0, 1, or 77 without it."""
import argparse
import json
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices over the network
try:
    import litellm
except ImportError:
    print("litellm is not installed")
    sys.exit(77)

TWO = [{"type": "function", "function": {"name": name, "description": "knows it", "parameters": {
    "type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}}} for name in ("weather", "clock")]
CALLS = [("weather", {"where": "Rome"}), ("weather", {"where": "Oslo"}), ("clock", {"where": "UTC"})]


def three_calls(shared):
    """TOOL-04: parallel calls, two of them to one tool, whole and put together from chunks."""
    shared = {**shared, "tools": TWO, "max_tokens": 200}
    whole = litellm.completion(**shared)
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **shared)), messages=shared["messages"])
    for answer in (whole, built):
        calls = answer.choices[0].message.tool_calls
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == CALLS, answer
        assert len({c.id for c in calls}) == 3 and answer.choices[0].finish_reason == "tool_calls", answer
    print("litellm: three calls passed")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="of the router, http://HOST:PORT")
    parser.add_argument("--model", default="baton-tiny")
    parser.add_argument("--three-calls", action="store_true", help="the cluster answers with three calls")
    args = parser.parse_args()
    shared = {"model": "openai/" + args.model, "api_base": args.url + "/v1", "api_key": "none", "max_tokens": 8,
              "temperature": 0, "messages": [{"role": "user", "content": "Say hello."}], "num_retries": 0, "timeout": 60}
    if args.three_calls:
        three_calls(shared)
        return
    whole = litellm.completion(**shared)
    assert whole.choices[0].finish_reason in ("stop", "length"), whole
    content, finishes = "", []
    for chunk in litellm.completion(stream=True, **shared):
        content += chunk.choices[0].delta.content or ""
        finishes += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert content == (whole.choices[0].message.content or ""), (content, whole)
    assert finishes == [whole.choices[0].finish_reason], finishes
    try:
        litellm.completion(**{**shared, "temperature": 3})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError("temperature 3 was taken")
    print("litellm: chat, stream, errors passed")


main()
