#!/usr/bin/env python3
"""with_litellm.py --url URL: chat, stream and errors through LiteLLM. Exit 0, 1, or 77 without it."""
import argparse
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices over the network
try:
    import litellm
except ImportError:
    print("litellm is not installed")
    sys.exit(77)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="of the router, http://HOST:PORT")
    parser.add_argument("--model", default="baton-tiny")
    args = parser.parse_args()
    shared = {"model": "openai/" + args.model, "api_base": args.url + "/v1", "api_key": "none", "max_tokens": 8,
              "temperature": 0, "messages": [{"role": "user", "content": "Say hello."}], "num_retries": 0, "timeout": 60}
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
