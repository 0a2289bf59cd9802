"""Softmax and Sinkhorn normalisation of the 4 x 4 stream mixing matrices: a Triton kernel for the GPU, plain PyTorch elsewhere.

The backward pass walks the normalisations in reverse: y = x / d with d = sum(x) + eps gives x = y * d and dx = (g - sum(g * y)) / d, so only the
divisors are kept."""
import torch


def plain(L, iters, eps):
    """L [N, 4, 4] -> C [N, 4, 4]"""
    c = torch.softmax(L, 2) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return c


try:
    import triton
    import triton.language as tl

    @triton.jit
    def forward_kernel(L, C, D, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        at = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        ok = (row < n)[:, None, None] & (four < 4)[None, :, None] & (four < 4)[None, None, :]
        x = tl.load(L + at, mask=ok, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        c = x / tl.sum(x, axis=2, keep_dims=True) + eps
        kat = row[:, None, None] * 4 + four[None, None, :]
        jat = row[:, None, None] * 4 + four[None, :, None]
        kok = (row < n)[:, None, None] & (four < 4)[None, None, :]
        jok = (row < n)[:, None, None] & (four < 4)[None, :, None]
        d = tl.sum(c, axis=1, keep_dims=True) + eps
        c = c / d
        tl.store(D + kat, d, mask=kok)
        for i in range(ITERS - 1):
            d2 = tl.sum(c, axis=2, keep_dims=True) + eps
            c = c / d2
            tl.store(D + (2 * i + 1) * n * 4 + jat, d2, mask=jok)
            d = tl.sum(c, axis=1, keep_dims=True) + eps
            c = c / d
            tl.store(D + (2 * i + 2) * n * 4 + kat, d, mask=kok)
        tl.store(C + at, c, mask=ok)

    @triton.jit
    def backward_kernel(G, C, D, DL, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        at = row[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        ok = (row < n)[:, None, None] & (four < 4)[None, :, None] & (four < 4)[None, None, :]
        g = tl.load(G + at, mask=ok, other=0.0)
        c = tl.load(C + at, mask=ok, other=0.25)
        kat = row[:, None, None] * 4 + four[None, None, :]
        jat = row[:, None, None] * 4 + four[None, :, None]
        kok = (row < n)[:, None, None] & (four < 4)[None, None, :]
        jok = (row < n)[:, None, None] & (four < 4)[None, :, None]
        for j in range(ITERS - 1):
            i = ITERS - 2 - j
            d = tl.load(D + (2 * i + 2) * n * 4 + kat, mask=kok, other=1.0)
            g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / d
            c = c * d
            d2 = tl.load(D + (2 * i + 1) * n * 4 + jat, mask=jok, other=1.0)
            g = (g - tl.sum(g * c, axis=2, keep_dims=True)) / d2
            c = c * d2
        d = tl.load(D + kat, mask=kok, other=1.0)
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / d
        p = c * d - eps
        tl.store(DL + at, p * (g - tl.sum(g * p, axis=2, keep_dims=True)), mask=ok)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, L, iters, eps):
            L = L.contiguous()
            n = L.shape[0]
            C, D = torch.empty_like(L), torch.empty(2 * iters - 1, n, 4, device=L.device)
            forward_kernel[(triton.cdiv(n, 128),)](L, C, D, n, eps, ITERS=iters, BLOCK=128)
            ctx.save_for_backward(C, D)
            ctx.rest = iters, eps
            return C

        @staticmethod
        def backward(ctx, G):
            C, D = ctx.saved_tensors
            iters, eps = ctx.rest
            n = C.shape[0]
            DL = torch.empty_like(C)
            backward_kernel[(triton.cdiv(n, 128),)](G.contiguous(), C, D, DL, n, eps, ITERS=iters, BLOCK=128)
            return DL, None, None
except ImportError:                                        # no Triton on this machine
    Fused = None


def sinkhorn(L, iters, eps):
    if L.is_cuda and Fused is not None:
        return Fused.apply(L, iters, eps)
    return plain(L, iters, eps)
