#!/usr/bin/env python3
"""with_openai.py --url URL: the surface as OpenAI's own SDK sees it, against a running cluster.

Says nothing about what the model writes: shapes, counts, ends and errors. Exit 0, 1, or 77 without the SDK.
"""
import argparse
import json
import sys
import threading
import time

try:
    import openai
except ImportError:
    print("openai is not installed")
    sys.exit(77)

TOOL = {"type": "function", "function": {
    "name": "add", "description": "adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}
TWO = [{"type": "function", "function": {"name": name, "description": "knows it", "parameters": {
    "type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}}} for name in ("weather", "clock")]
CALLS = [("weather", {"where": "Rome"}), ("weather", {"where": "Oslo"}), ("clock", {"where": "UTC"})]
HI = [{"role": "user", "content": "Say hello."}]


def models(client):
    listed = client.models.list().data
    assert listed and listed[0].object == "model", listed
    assert client.models.retrieve(listed[0].id).id == listed[0].id
    return listed[0].id


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=8, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and choice.index == 0 and choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    usage = answer.usage
    assert 1 <= usage.completion_tokens <= 8 and usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return answer


def stream(client, model, whole):
    content, reasoning, ids, finishes, usages = "", "", set(), [], []
    for i, chunk in enumerate(client.chat.completions.create(
            model=model, messages=HI, max_tokens=8, temperature=0, stream=True,
            stream_options={"include_usage": True})):
        ids.add((chunk.id, chunk.created, chunk.model))
        if chunk.usage is not None:
            usages.append(chunk.usage)
            assert chunk.choices == []
            continue
        delta = chunk.choices[0].delta
        if i == 0:
            assert delta.role == "assistant" and delta.content == "", delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        if chunk.choices[0].finish_reason:
            finishes.append(chunk.choices[0].finish_reason)
    message = whole.choices[0].message
    assert len(ids) == 1, ids
    assert finishes == [whole.choices[0].finish_reason], finishes
    assert len(usages) == 1 and usages[0].completion_tokens == whole.usage.completion_tokens
    assert usages[0].prompt_tokens == whole.usage.prompt_tokens
    assert content == (message.content or ""), (content, message.content)
    assert reasoning == (getattr(message, "reasoning_content", None) or "")


def completions(client, model):
    answer = client.completions.create(model=model, prompt=["Once", "The end"], n=2, max_tokens=4, temperature=0,
                                       logprobs=2, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text  # greedy: both choices of one prompt
    for choice in answer.choices:
        n = len(choice.logprobs.tokens)
        assert n == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)
        assert all(p <= 0 for p in choice.logprobs.token_logprobs)
        if not any(t.startswith("bytes:") for t in choice.logprobs.tokens):
            assert "".join(choice.logprobs.tokens).startswith(choice.text)
    text = ""
    for chunk in client.completions.create(model=model, prompt="Once", max_tokens=4, temperature=0, stream=True):
        text += chunk.choices[0].text
    assert text == answer.choices[0].text, (text, answer.choices[0].text)
    echoed = client.completions.create(model=model, prompt="Once", max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text == "Once" + text


def chat_logprobs(client, model):
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=4, temperature=0, logprobs=True,
                                            top_logprobs=3)
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3
        best = token.top_logprobs[0]  # greedy takes the best
        assert token.logprob == best.logprob and token.token == best.token


def tools(client, model):
    answer = client.chat.completions.create(
        model=model, messages=HI, tools=[TOOL], max_tokens=64, temperature=0,
        tool_choice={"type": "function", "function": {"name": "add"}})
    choice = answer.choices[0]
    calls = choice.message.tool_calls
    assert calls and calls[0].function.name == "add" and calls[0].type == "function" and calls[0].id
    assert choice.finish_reason in ("tool_calls", "length")
    names, arguments = [], ""
    for chunk in client.chat.completions.create(
            model=model, messages=HI, tools=[TOOL], max_tokens=64, temperature=0, stream=True,
            tool_choice={"type": "function", "function": {"name": "add"}}):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index == 0:
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
    assert names == ["add"], names
    assert arguments == calls[0].function.arguments, (arguments, calls[0].function.arguments)


def errors(client, model):
    for arguments, kind, param in [
            ({"temperature": 3}, openai.BadRequestError, "temperature"),
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
            ({"stop": [""]}, openai.BadRequestError, "stop.0"),
            ({"model": "no-such-model"}, openai.NotFoundError, "model"),
            ({"messages": []}, openai.BadRequestError, "messages")]:
        for streamed in (False, True):
            try:
                client.chat.completions.create(**{"model": model, "messages": HI, "stream": streamed, **arguments})
            except kind as error:
                assert error.param == param and error.code and error.type == "invalid_request_error", error
            else:
                raise AssertionError(f"{arguments} was taken")


def timeouts(client, model):
    """A client that gives up is gone, and its rows with it: what comes after it is served. A token takes 5 ms there, so that
    the answer takes fifteen seconds; four rows are all that there are."""
    impatient = client.with_options(timeout=1, max_retries=0)
    try:
        impatient.chat.completions.create(model=model, messages=HI, n=4, max_tokens=3000, extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("3000 steps of 5 ms within a second")
    chat(client.with_options(timeout=10), model)


def three_calls(client, model):
    """TOOL-04: parallel calls, two of them to one tool, whole and in deltas."""
    shared = {"model": model, "messages": HI, "tools": TWO}
    choice = client.chat.completions.create(**shared).choices[0]
    found = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert found == CALLS and choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    assert len({c.id for c in choice.message.tool_calls}) == 3, choice
    with client.chat.completions.stream(**shared) as stream:  # the SDK puts the deltas together by itself
        choice = stream.get_final_completion().choices[0]
    found = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert found == CALLS and choice.finish_reason == "tool_calls", choice
    assert len({c.id for c in choice.message.tool_calls}) == 3, choice


def overload(url, model):
    """SCHED-03: many more requests than there is room for, with the SDK's own retries on and off."""
    served = []
    for retries in (0, 2):
        client, ends, start = openai.OpenAI(base_url=url, api_key="none", max_retries=retries, timeout=60), [], time.monotonic()

        def one(i, client=client, ends=ends):
            try:
                answer = client.chat.completions.create(model=model, messages=HI, max_tokens=20, stream=i % 2 == 0)
                if i % 2 == 0:
                    reasons = [c.choices[0].finish_reason for c in answer if c.choices and c.choices[0].finish_reason]
                    assert len(reasons) == 1, reasons
                ends.append("good")
            except openai.RateLimitError as error:
                assert error.code == "queue_full" and int(error.response.headers["retry-after"]) >= 1, error
                ends.append("refused")

        threads = [threading.Thread(target=one, args=(i,)) for i in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
        assert len(ends) == 100, "a request without an end that is allowed"
        assert ends.count("good") >= 12 and seconds < 60, (ends.count("good"), seconds)
        served.append(ends.count("good"))
        print(f"max_retries {retries}: {ends.count('good')} of 100 served in {seconds:.1f} s, the others told when to come")
    assert served[1] >= served[0], served


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="of the router, http://HOST:PORT")
    parser.add_argument("--three-calls", action="store_true", help="the cluster answers with three calls")
    parser.add_argument("--overload", action="store_true", help="the cluster has four rows of 5 ms a token, and room for twelve requests")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url + "/v1", api_key="none", max_retries=0, timeout=60)
    model = models(client)
    if args.overload or args.three_calls:
        if args.overload:
            timeouts(client, model)
            overload(args.url + "/v1", model)
        else:
            three_calls(client, model)
        print(f"openai {openai.__version__}: {'overload' if args.overload else 'three calls'} passed")
        return 0
    whole = chat(client, model)
    steps = {"stream": lambda: stream(client, model, whole), "completions": lambda: completions(client, model),
             "logprobs": lambda: chat_logprobs(client, model), "tools": lambda: tools(client, model),
             "errors": lambda: errors(client, model)}
    failed = 0
    for name, step in steps.items():
        try:
            step()
            print(f"{name}: ok")
        except Exception as error:  # a step that fails says so, and the others still run
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    print(f"openai {openai.__version__}: {len(steps) + 2 - failed} of {len(steps) + 2} passed")
    return failed != 0


sys.exit(main())
