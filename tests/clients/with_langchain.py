#!/usr/bin/env python3
"""with_langchain.py --url URL: chat, stream and tools through langchain-openai. Exit 0, 1, or 77 without it."""
import argparse
import sys

try:
    from langchain_openai import ChatOpenAI
except ImportError:
    print("langchain-openai is not installed")
    sys.exit(77)

TOOL = {"type": "function", "function": {
    "name": "add", "description": "adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}

TWO = [{"type": "function", "function": {"name": name, "description": "knows it", "parameters": {
    "type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}}} for name in ("weather", "clock")]
CALLS = [("weather", {"where": "Rome"}), ("weather", {"where": "Oslo"}), ("clock", {"where": "UTC"})]


def three_calls(llm):
    """TOOL-04: parallel calls, two of them to one tool, whole and put together from chunks."""
    asks = llm.bind_tools(TWO)
    total = None
    for piece in asks.stream("Say hello.", max_tokens=200):
        total = piece if total is None else total + piece
    for answer in (asks.invoke("Say hello.", max_tokens=200), total):
        assert [(c["name"], c["args"]) for c in answer.tool_calls] == CALLS and not answer.invalid_tool_calls, answer
        assert len({c["id"] for c in answer.tool_calls}) == 3, answer
    print("langchain-openai: three calls passed")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="of the router, http://HOST:PORT")
    parser.add_argument("--model", default="baton-tiny")
    parser.add_argument("--three-calls", action="store_true", help="the cluster answers with three calls")
    args = parser.parse_args()
    llm = ChatOpenAI(base_url=args.url + "/v1", api_key="none", model=args.model, temperature=0, max_tokens=8,
                     max_retries=0, timeout=60, stream_usage=True)
    if args.three_calls:
        three_calls(llm)
        return
    whole = llm.invoke("Say hello.")
    assert whole.response_metadata["finish_reason"] in ("stop", "length"), whole
    assert whole.usage_metadata["output_tokens"] >= 1
    total = None
    for piece in llm.stream("Say hello."):
        total = piece if total is None else total + piece
    assert total.content == whole.content, (total.content, whole.content)
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    forced = llm.bind_tools([TOOL], tool_choice="add").invoke("Say hello.", max_tokens=64)
    calls = forced.tool_calls + forced.invalid_tool_calls  # one that was cut has no whole arguments
    assert [c["name"] for c in calls] == ["add"], forced
    print("langchain-openai: chat, stream, tools passed")


main()
