"""The quantisers of DeepSeek-V4, exact, with straight-through gradients.

S8   activations and cache: groups of B, E4M3, power-of-two scale 2^ceil(log2(amax / 448))
S4   index keys and queries: groups of 32, E2M1, scale 2^ceil(log2(amax / 6))
FP8  weights: 128 x 128 tiles, E4M3 with an E8M0 scale
MX4  expert weights: groups of 32 inputs, E2M1 with an E8M0 scale
All return dequantised values: what the checkpoint or the cache will mean.  The weight forms return (codes, exponents) on request, for the export.
"""
import torch


class Straight(torch.autograd.Function):
    """Value of q, gradient of x."""
    @staticmethod
    def forward(ctx, x, q):
        return q.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


def through(x, q):
    return Straight.apply(x, q.detach())


def pow2_ceil(amax, top):
    """2^ceil(log2(amax / top)) from the bits of the float32 product, and its exponent"""
    t = (amax.float() * (1.0 / top)).view(torch.int32)
    e = ((t >> 23) & 255) + ((t & 0x7fffff) != 0).to(torch.int32)
    return (e << 23).view(torch.float32), e


def e4m3(x):
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def e2m1(x):
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign((torch.round(a / step) * step).clamp(max=6.0), x)


def s8(x, group):
    g = x.detach().float().unflatten(-1, (-1, group))
    s, _ = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    return through(x, (e4m3(g / s) * s).flatten(-2).to(x.dtype))


def s4(x):
    g = x.detach().float().unflatten(-1, (-1, 32))
    s, _ = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0 ** -126), 6.0)
    return through(x, (e2m1(g / s) * s).flatten(-2).to(x.dtype))


def fp8_codes(w):
    """[..., o, i] with o, i multiples of 128 or one partial tile -> (w / s, exponent per tile, dequantised)"""
    o, i = w.shape[-2:]
    p, q = -o % 128, -i % 128
    t = torch.nn.functional.pad(w.detach().float(), (0, q, 0, p)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    s, e = pow2_ceil(t.abs().amax((-1, -3), keepdim=True).clamp(min=1e-4), 448.0)
    c = t / s
    back = (e4m3(c) * s).flatten(-2).flatten(-3, -2)[..., :o, :i]
    return c.flatten(-2).flatten(-3, -2)[..., :o, :i], e[..., 0, :, 0], back


def mx4_codes(w):
    """[..., o, i], i a multiple of 32 -> (rounded w / s, exponent per group, dequantised); of the two scales round amax / 6 the one with less error"""
    g = w.detach().float().unflatten(-1, (-1, 32))
    s, e = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=1e-6), 6.0)
    hi, lo = e2m1(g / s), e2m1(g / (s * 0.5))
    err = lambda c, k: (c * k - g).square().sum(-1, keepdim=True)
    low = err(lo, s * 0.5) < err(hi, s)
    c, s, e = torch.where(low, lo, hi), torch.where(low, s * 0.5, s), torch.where(low, e - 1, e)
    return c, e[..., 0], (c * s).flatten(-2)


def fp8(w):
    return through(w, fp8_codes(w)[2].to(w.dtype))


def mx4(w):
    return through(w, mx4_codes(w)[2].to(w.dtype))


def hadamard(n, device=None):
    h = torch.ones(1, 1, device=device)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * n ** -0.5
