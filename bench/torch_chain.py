#!/usr/bin/env python3
"""The choice of entries and attention of a sparse layer as plain torch operations: what engines run on cards that their kernels don't serve.

    bench/torch_chain.py [ROWS TOKENS]...      default: 1 8192 16 8192

V4-Flash: 64 index heads of 128 against e4m3 keys of every fourth token (our pages have them in four bits), the best 512, 64 heads of 512 over those and a window of 128 tokens, entries
of 448 e4m3 with a scale for 64 and 64 bfloat16. All rows of a batch go through each operation together, nothing is looped over, so this is the
formulation at its best. Prints microseconds a layer: each operation launched by the host, and recorded in a CUDA graph; compare with
`bench_attention` in the same minute. Needs torch and a CUDA device; exits 77 without.
"""
import statistics
import sys

try:
    import torch
except ImportError:
    sys.exit(77)

INDEX_HEADS, INDEX_DIM, BEST, HEADS, DIM, ROPE, WINDOW, RATIO, COPIES = 64, 128, 512, 64, 512, 64, 128, 4, 8


class Layer:
    """A layer's caches for a batch, each row with pages of its own."""

    def __init__(self, rows, entries):
        def normal(*shape):
            return torch.randn(*shape, device='cuda')
        self.keys = normal(rows, entries, INDEX_DIM).to(torch.float8_e4m3fn)
        self.key_scales = torch.rand(rows, entries, 1, device='cuda') + 0.5
        self.low = normal(rows, entries, DIM - ROPE).to(torch.float8_e4m3fn)
        self.low_scales = torch.rand(rows, entries, (DIM - ROPE) // 64, 1, device='cuda') + 0.5
        self.rope = normal(rows, entries, ROPE).bfloat16()
        self.window = normal(rows, WINDOW, DIM).bfloat16()


def chain(layer, iq, iw, q, sink):
    """Rows' outputs [rows, HEADS, DIM] and choices [rows, BEST]."""
    keys = (layer.keys.float() * layer.key_scales).bfloat16()
    scores = torch.relu(torch.bmm(iq, keys.transpose(1, 2)).float())
    scores = (scores * iw[:, :, None]).sum(1)
    best = scores.topk(min(BEST, scores.shape[1]), dim=1).indices
    rows = torch.arange(best.shape[0], device='cuda')[:, None]
    low = layer.low[rows, best].float().unflatten(2, (-1, 64)) * layer.low_scales[rows, best]
    kv = torch.cat([low.flatten(2).bfloat16(), layer.rope[rows, best]], 2)
    kv = torch.cat([layer.window, kv], 1)
    logits = torch.bmm(q, kv.transpose(1, 2)).float() * DIM ** -0.5
    logits = torch.cat([logits, sink[None, :, None].expand(logits.shape[0], -1, 1)], 2)
    return torch.bmm(logits.softmax(2)[:, :, :-1].bfloat16(), kv), best


def time_us(run, n=20):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    times = []
    for _ in range(7):
        start.record()
        for _ in range(n):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / n)
    return statistics.median(times)


def main(words):
    if not torch.cuda.is_available():
        sys.exit(77)
    cases = list(zip(map(int, words[0::2]), map(int, words[1::2]))) or [(1, 8192), (16, 8192)]
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    for rows, tokens in cases:
        layers = [Layer(rows, tokens // RATIO) for _ in range(COPIES)]
        iq = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device='cuda').bfloat16()
        iw = torch.randn(rows, INDEX_HEADS, device='cuda')
        q = torch.randn(rows, HEADS, DIM, device='cuda').bfloat16()
        sink = torch.randn(HEADS, device='cuda')

        def run():
            for layer in layers:
                chain(layer, iq, iw, q, sink)
        host = time_us(run, 3) / COPIES
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        print(f'{rows} rows, {tokens} tokens: {host:.1f} us a layer launched by the host, {time_us(graph.replay, 5) / COPIES:.1f} us in a graph')


if __name__ == '__main__':
    main(sys.argv[1:])
