"""What a layer of a canvas model does besides its products: norms, heads and the choice of experts.

The references against NumPy in float64; the Mosaic forms, interpreted, against the references.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.kernels.layer import (
    Fp8Sums,
    RoutedRows,
    fp8,
    gate,
    mosaic_gate,
    mosaic_heads,
    mosaic_norm,
    norm_rotate,
    quantize_rows,
    reference,
    sandwich_norm,
)
from dllm_jax.kernels.router import Rule, choose_experts, route
from dllm_jax.kernels.router import mosaic as router_mosaic
from dllm_jax.kernels.router import reference as router_reference
from tests.cross_lowering import needs_mosaic
from tests.kernels.test_layer_mosaic import (
    close,
    hopper,  # noqa: F401 (a fixture)
    integers,
    interpreted,
    lowered,
    normal,
    real,
)
from tests.oracles import layer as oracle

pytestmark = pytest.mark.long

EPS = 1e-6
choose: Any = choose_experts
turn: Any = norm_rotate
like_heads: Any = reference.norm_rotate
like_norms: Any = reference.sandwich_norm
like_choice: Any = router_reference.choose_experts


def heads_of(rows, groups, queries, size, shares_values) -> Any:
    """Operands of `norm_rotate`."""
    both = queries + 2 - shares_values
    qkv, q_norm, k_norm = normal(0, (*rows, groups, both, size), (size,), (size,))
    (angle,) = normal(1, (*rows, size // 2), dtype="float32")
    return qkv, q_norm, k_norm, np.cos(9 * angle), np.sin(9 * angle)


def numpy_heads(given: Any, shares_values):
    qkv, q_norm, k_norm, cos, sin = given
    x, groups, both = qkv.astype(np.float64), *qkv.shape[-3:-1]
    n = both - (1 if shares_values else 2)

    def head(g, j, scale):
        return oracle.rotate(oracle.rms_norm(x[..., g, j, :], scale, EPS), cos, sin)

    cos, sin = cos.astype(np.float64), sin.astype(np.float64)
    q = [head(g, j, q_norm) for g in range(groups) for j in range(n)]
    k = [head(g, n, k_norm) for g in range(groups)]
    v = oracle.rms_norm(x[..., -1, :], np.ones(x.shape[-1]), EPS)
    return np.stack(q, axis=-2), np.stack(k, axis=-2), v


@pytest.mark.slow("1", unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "groups", "queries", "size", "shares_values"),
    [((1, 8), 2, 2, 64, False), ((4,), 1, 3, 512, True)],
)
def test_heads_match_numpy(rows, groups, queries, size, shares_values):
    given = heads_of(rows, groups, queries, size, shares_values)
    want = numpy_heads(given, shares_values)
    run = functools.partial(mosaic_heads.norm_rotate, shares_values=shares_values, eps=EPS)
    got = interpreted(run, *given)
    here: Any = map(jnp.asarray, given)
    like = like_heads(*here, EPS, shares_values=shares_values)
    for a, b, same in zip(got, want, like, strict=True):
        assert a.shape == b.shape
        assert a.dtype == same.dtype
        close(a, b)
        close(same, b)
        assert (a == same).mean() > 0.99  # rounded where the reference rounds


def norms_of(is_second, rows=(1, 3), width=512, dtype="bfloat16") -> Any:
    """Operands of `sandwich_norm`, as of the first and the second half of a layer."""
    x, a, b, *scales = normal(2, *[(*rows, width)] * 3, *[(width,)] * 4, dtype=dtype)
    factors = np.float32([1.003, 0.697])  # of more bits than the rows have
    if not is_second:
        return x, ((a, scales[0]),), tuple(scales[1:3]), {}
    mode = np.arange(np.prod(rows)).reshape(rows) % 2 == 0
    branches = (a, scales[0]), (b, scales[1])
    return x, branches, (scales[2],), {"outer": scales[3], "factor": (factors, mode)}


@needs_mosaic
@pytest.mark.parametrize("is_second", [False, True])
def test_norms_of_both_halves_match_numpy(is_second):
    x, branches, following, how = norms_of(is_second)
    out = sum(oracle.rms_norm(np.float64(y), scale, EPS) for y, scale in branches)
    if is_second:
        out = oracle.rms_norm(out, how["outer"], EPS)
    total = np.float64(x) + out
    if is_second:
        factors, mode = how["factor"]
        total *= np.where(mode, np.float64(factors[1]), np.float64(factors[0]))[..., None]
    want = [total, *(oracle.rms_norm(total, scale, EPS) for scale in following)]

    run = functools.partial(mosaic_norm.sandwich_norm, **jax.tree.map(jnp.asarray, how), eps=EPS)
    given = jax.tree.map(jnp.asarray, (branches, following))
    with_routed = given
    if is_second:  # the experts' half by places, of which a row has one
        first, (rows, scale) = given[0]
        place = jnp.asarray([[[2, 9], [9, 0], [1, 9]]], jnp.int32)
        results = rows[0, jnp.asarray([1, 2, 0])]
        weights = jnp.where(place < 9, 1.0, jnp.nan)
        with_routed = (first, (RoutedRows(results, place, weights), scale)), given[1]
    kept, normed = interpreted(lambda x, **more: run(x, *with_routed, **more), x)
    like, others = like_norms(jnp.asarray(x), *given, EPS, **how)
    for a, b, same in zip([kept, *normed], want, [like, *others], strict=True):
        assert a.shape == b.shape
        close(a, b)
        close(same, b)
        assert (a == same).mean() > 0.99


def sums_of(seed, rows, outputs) -> Any:
    """A product of 8 bits, and the same as rows of 16."""
    sums, by_row, by_column = normal(seed, (*rows, *outputs), rows, outputs, dtype="float32")
    scales = map(jnp.asarray, (1 + by_row**2, 1 + by_column**2))
    product = Fp8Sums(jnp.asarray(sums, jnp.bfloat16), *scales)
    return product, product.rounded(jnp.bfloat16)


def same_rows(got: Any, want: Any, share=0.95):
    """Rows of 8 bits that another order of roundings may round otherwise, here and there."""
    want = jax.tree.map(np.asarray, want)
    assert got.values.shape == want.values.shape
    assert got.values.dtype == want.values.dtype
    assert (got.values == want.values).mean() > share
    ratio = np.asarray(got.scales) / want.scales  # of powers of two; at an edge the next one
    assert (np.abs(ratio - 1) < 1e-2).mean() > share
    assert (np.abs(np.log2(ratio)) < 1.02).all()
    restored = np.float32(want.values) * want.scales[..., None]
    close(np.float32(got.values) * got.scales[..., None], restored, 1 / 8)  # e4m3's spacing


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
def test_heads_of_a_product_of_8_bits_are_those_of_its_rounded_rows():
    sums, plain = sums_of(5, (1, 8), (2, 4, 64))
    _, *scales, cos, sin = heads_of((1, 8), 2, 2, 64, False)

    def run(*given, **how):
        return mosaic_heads.norm_rotate(sums, *given, EPS, dtype=jnp.bfloat16, **how)

    got = interpreted(run, *scales, cos, sin)
    want = like_heads(plain, *map(jnp.asarray, (*scales, cos, sin)), EPS)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a == b).mean() > 0.99


@pytest.mark.slow("True", unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize("is_second", [False, True])
def test_norms_from_8_bits_to_8_bits_are_those_of_rounded_rows(is_second):
    x, branches, following, how = jax.tree.map(jnp.asarray, norms_of(is_second))
    sums, plain = sums_of(6, (1, 3), (512,))
    (_, scale), *others = branches

    def norms(call, rows, **more):
        return call(x, ((rows, scale), *others), following, EPS, is_quantized=True, **how, **more)

    kept, normed = interpreted(functools.partial(norms, mosaic_norm.sandwich_norm, sums))
    like, (first, *rest) = norms(sandwich_norm, plain, implementation="xla")
    assert (kept == like).mean() > 0.99
    same_rows(normed[0], first)
    for a, b in zip(normed[1:], rest, strict=True):
        assert (a == b).mean() > 0.99


@pytest.mark.slow("160", unless="pallas_kernels")
@needs_mosaic
@pytest.mark.parametrize(("activation", "width"), [("silu", 96), ("gelu", 160)])
def test_gates_from_8_bits_to_8_bits_are_those_of_rounded_rows(activation, width):
    sums, plain = sums_of(7, (2, 8), (3, 2, 32))
    how: Any = {"activation": activation, "dtype": jnp.bfloat16, "width": width}
    run = functools.partial(mosaic_gate.gate, sums, **how)
    inner = reference.gated(plain.astype(jnp.float32), activation).astype(jnp.bfloat16)
    want = fp8.quantize_rows(fp8.filled(inner, width))
    same_rows(interpreted(run), want)


def router_of(rows, width, experts, dtype="bfloat16") -> Any:
    x, scale, weights, factors = normal(3, (rows, width), (width,), (width, experts), (experts,))
    live = np.arange(rows) % 5 > 0
    given = [np.asarray(a).astype(jnp.dtype(dtype)) for a in (x, scale, weights, factors)]
    return *given, live


def numpy_choice(given: Any, k):
    *given, live = given
    x, scale, weights, factors = (a.astype(np.float64) for a in given)
    logits = oracle.rms_norm(x, scale * x.shape[1] ** -0.5, EPS) @ weights
    law = np.exp(logits - logits.max(axis=1, keepdims=True))
    ids = np.argsort(-law, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(law, ids, axis=1)
    return (
        np.where(live[:, None], ids, len(factors)),
        best / best.sum(axis=1, keepdims=True) * factors[ids],
    )


def test_experts_are_those_that_float64_chooses():
    given = router_of(64, 128, 64)
    ids, shares = choose(*map(jnp.asarray, given), k=3, eps=EPS)
    wanted, weights = numpy_choice(given, 3)
    assert np.array_equal(ids, wanted)
    np.testing.assert_allclose(shares, weights, rtol=0, atol=1e-5)


@needs_mosaic
@pytest.mark.parametrize("most_split", [64, 0])
def test_experts_of_16_bits_on_the_tensor_cores_are_those_of_float32(most_split, monkeypatch):
    """Parts of the depth are added up by the choice, or by the block that makes them."""
    monkeypatch.setattr(router_mosaic, "_MOST_SPLIT", most_split)
    router_mosaic.choose_experts.clear_cache()  # whose key does not hold that number
    given = router_of(64, 640, 64)  # parts: more than a block holds
    call = functools.partial(router_mosaic.choose_experts, k=3, eps=EPS)
    ids, shares = interpreted(call, *given)
    here: Any = map(jnp.asarray, given)
    like, theirs = like_choice(*here, k=3, eps=EPS)
    assert np.array_equal(ids, like)
    np.testing.assert_allclose(shares, theirs, rtol=0, atol=1e-5)


@needs_mosaic
def test_of_equal_experts_the_lowest_is_chosen():
    x, scale, weights, factors, live = router_of(64, 64, 64)
    weights[:, 1::2] = weights[:, ::2]  # each one twice
    given = x, scale, weights, factors, live
    ids, _ = interpreted(functools.partial(router_mosaic.choose_experts, k=4, eps=EPS), *given)
    pairs = ids[live]
    assert np.array_equal(pairs[:, ::2] % 2, np.zeros_like(pairs[:, ::2]))
    assert np.array_equal(pairs[:, 1::2], pairs[:, ::2] + 1)


RULES = {
    "softmax": (Rule(k=3), 24, False),
    "groups": (Rule(k=3, score="sigmoid", factor=2.5, groups=8, kept_groups=2), 64, True),
}


@needs_mosaic
@pytest.mark.parametrize("name", RULES)
def test_a_route_of_16_bits_on_the_tensor_cores_is_that_of_float32(name):
    """Sums of small integers are exact, so experts have equal scores, and whole groups too."""
    rule, rows, has_bias = RULES[name]
    x, weights, bias = integers(4, (rows, 128), (128, 64), (64,))
    weights[:, 32:40], bias[32:40] = weights[:, :8], bias[:8]
    live = np.arange(rows) % 5 > 0
    given = x, weights / 16, bias.astype(np.float32) / 16, live
    given = given if has_bias else (*given[:2], None, None)
    given = [None if leaf is None else jnp.asarray(leaf) for leaf in given]
    there = [leaf for leaf in given if leaf is not None]

    def run(*leaves, interpret):
        every = iter(leaves)
        filled = [None if leaf is None else next(every) for leaf in given]
        return router_mosaic.route(*filled, rule=rule, interpret=interpret)

    ids, shares = interpreted(run, *there)
    like, theirs = router_reference.route(*given, rule=rule)
    assert np.array_equal(ids, like)
    np.testing.assert_allclose(shares, theirs, rtol=0, atol=1e-5)


@needs_mosaic
def test_a_row_has_the_same_scores_among_few_rows_and_many():
    """Of many rows a block adds up the parts of the depth; of few, the choice does."""
    x, weights = normal(6, (1088, 512), (512, 64))
    few, many = (interpreted(router_mosaic.scores, x[:n], weights) for n in (64, len(x)))
    assert (len(few), len(many)) == (4, 1)
    assert np.array_equal(many[0, :64], functools.reduce(np.add, few))


@pytest.mark.slow(unless="pallas_kernels")
@needs_mosaic
def test_they_lower_to_one_launch_each_and_the_router_to_two(on_hopper):
    heads, cos = real(1, 256, 8, 4, 256), real(1, 256, 128, dtype=jnp.float32)
    turned = functools.partial(turn, eps=EPS, implementation="mosaic")
    assert lowered(turned, heads, real(256), real(256), cos, cos) == (1, 0)
    x, scale, mode = real(1, 256, 2816), real(2816), real(1, 256, dtype=bool)

    def norms(x, scale, mode, factors):
        how = {"outer": scale, "factor": (factors, mode), "implementation": "mosaic"}
        return sandwich_norm(x, ((x, scale), (x, scale)), (scale,), EPS, **how)

    assert lowered(norms, x, scale, mode, real(2)) == (1, 0)

    def small(sums, by_row, by_column):
        both = Fp8Sums(sums, by_row, by_column)
        how = {"dtype": jnp.bfloat16, "is_quantized": True, "implementation": "mosaic"}
        return gate(both, "gelu", **how)

    scales = real(1, 256, dtype=jnp.float32), real(66, 2, 32, dtype=jnp.float32)
    assert lowered(small, real(1, 256, 66, 2, 32), *scales) == (1, 0)

    def small_norms(x, sums, by_row, by_column, scale):
        branches = ((Fp8Sums(sums, by_row, by_column), scale),)
        how = {"is_quantized": True, "implementation": "mosaic"}
        return sandwich_norm(x, branches, (scale, scale), EPS, **how)

    wide, column = real(1, 256, 2816), real(2816, dtype=jnp.float32)
    assert lowered(small_norms, x, wide, scales[0], column, scale) == (1, 0)
    chosen = functools.partial(choose, k=8, eps=EPS, implementation="mosaic")
    rows, weights, live = real(256, 2816), real(2816, 128), real(256, dtype=bool)
    assert lowered(chosen, rows, scale, weights, real(128), live) == (2, 0)
    rule = Rule(k=8, score="sigmoid", factor=2.5, groups=8, kept_groups=4)
    routed = functools.partial(route, rule=rule, implementation="mosaic")
    given = real(32, 2048), real(2048, 256), real(256, dtype=jnp.float32), real(32, dtype=bool)
    assert lowered(routed, *given) == (2, 0)
    of_a_lane = Rule(k=8, score="sigmoid", groups=64, kept_groups=8)
    reason = router_mosaic.unsupported_route(*given[:2], of_a_lane)
    assert reason == "needs a number of groups that divides 32, got 64"


@needs_mosaic
def test_what_mosaic_cannot_do_is_refused_by_name(on_hopper):
    def refused(call, *shapes, **how):
        run = functools.partial(call, **how, implementation="mosaic")
        with pytest.raises(NotImplementedError) as error:
            jax.eval_shape(run, *shapes)
        return str(error.value)

    angle = real(4, 32, dtype=jnp.float32)
    half = refused(norm_rotate, real(4, 2, 4, 128), real(128), real(128), angle, angle, eps=EPS)
    assert 'got 128, 64 of them rotated, and 4 rows; use "xla"' in half

    def norms(x, **how):
        return sandwich_norm(x, ((x, x[0]),), (x[0],), EPS, **how)

    assert 'up to 4096, got 320; use "xla"' in refused(norms, real(4, 320))
    assert "16-bit type, got float32" in refused(norms, real(4, 512, dtype=jnp.float32))
    odd = (real(65, 128), real(128), real(128, 64), real(64), real(65, dtype=bool))
    assert "got 65, 128 and 64" in refused(choose_experts, *odd, k=2, eps=EPS)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@needs_mosaic
@pytest.mark.parametrize("rows", [256, 4096])
def test_a_layer_in_8_bits_is_that_of_numpy_and_xla_on_a_gpu(rows):
    """DiffusionGemma's products, with sums in 16 bits; what is rounded for them and reads them.

    Of what comes out 64 rows are compared on the host: converting all would take most of the time.
    What is held to is not compiled as a whole: XLA would leave out roundings to 16 bits.
    """
    D, A, F = 2816, 4096, 2112
    few = lambda out: jax.tree.map(lambda leaf: np.asarray(leaf[:, :: rows // 64]), out)  # noqa: E731
    (angle,) = normal(2, (1, rows, 128), dtype="float32")
    outputs = {"qkv": (D, 8, 4, 256), "o": (A, D), "gate": (D, F // 32, 2, 32), "down": (F, D)}

    @functools.partial(jax.jit, static_argnames=("depth", "shape", "form"))
    def multiplied(key, depth, shape, form):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (1, rows, depth), jnp.bfloat16)
        w = jax.random.normal(keys[1], (depth, *shape), jnp.bfloat16) * depth**-0.5
        small, held = fp8.quantize_matrix(w), quantize_rows(x, implementation=form)
        product = fp8.product(held, small, dtype=jnp.bfloat16)
        more = jax.random.normal(keys[2], (1, rows, D), jnp.bfloat16)
        scales = jax.random.normal(keys[3], (2, D), jnp.bfloat16)
        return small, held, fp8.quantize_rows(x), product, more, scales

    for i, (name, (depth, *shape)) in enumerate(outputs.items()):
        form = "mosaic" if name == "o" else "xla"  # the norms and the gate round the others
        given = multiplied(jax.random.key(i), depth, tuple(shape), form)
        small, held, like_held, product, stream, scales = given
        same_rows(few(held), few(like_held), 0.999)
        assert product.sums.dtype == jnp.bfloat16
        left = few(held)
        left = np.float32(left.values[0]) * left.scales[0, :, None]
        right = np.float32(small.flat.values) * np.asarray(small.flat.scales)[:, None]
        # 14 bits of a sum on the tensor cores, then 8 bits of it.
        plain = product.rounded(jnp.bfloat16)
        want = (left @ right.T).reshape(1, len(left), *shape)
        close(few(product.rounded(jnp.float32)), want, 0.02)
        if name == "qkv":
            given = *scales[:, :256], np.cos(9 * angle), np.sin(9 * angle), EPS
            run = functools.partial(turn, implementation="mosaic", dtype=jnp.bfloat16)
            for a, b in zip(run(product, *given), like_heads(plain, *given), strict=True):
                assert (a == b).mean() > 0.99
        elif name == "gate":
            run = functools.partial(gate, activation="gelu", dtype=jnp.bfloat16, is_quantized=True)
            own = jax.jit(functools.partial(run, implementation="mosaic"))(product)
            same_rows(few(own), few(run(plain, implementation="xla")))
        else:
            scale = scales[0]
            norms = (1 + scale,) if name == "down" else (1 + scale, scale)

            def run(inner, form, norms=norms, stream=stream, scale=scale):
                how: Any = {"is_quantized": True, "implementation": form}
                return sandwich_norm(stream, ((inner, scale),), norms, EPS, **how)

            kept, normed = jax.jit(run, static_argnums=1)(product, "mosaic")
            like, (first, *rest) = run(plain, "xla")
            assert (kept == like).mean() > 0.99
            same_rows(few(normed[0]), few(first))
            for a, b in zip(normed[1:], rest, strict=True):
                assert (a == b).mean() > 0.99
