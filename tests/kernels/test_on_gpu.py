"""Each GPU kernel on a GPU: the checks in bf16, and the record preset's sizes; attention and the model
as they train. Skipped without one."""

import pytest
import torch

import checks
import triton_kernels as tk
from common import int32, normal, random_batch, train_gpt

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]
HAS_FP8 = GPU and tk.has_fp8(torch.device("cuda"))
fp8_units = pytest.mark.skipif(not HAS_FP8, reason="no FP8 units")
BF16 = torch.bfloat16
VALUES = ["random", "zeros", "equal", "large", "nan"]
SHAPES = [(1, 64, 32), (2, 130, 70), (1, 257, 40), (3, 20, 300), (5, 768, 768), (3, 3072, 768)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["XXT", "XTX", "ba_plus_cAA", "aX_plus_BX", "aX_plus_XB"])
def test_product(name: str, shape: tuple[int, ...]) -> None:
    for values in VALUES:
        checks.check_product(name, shape, BF16, values, "cuda", "cuda")


@pytest.mark.parametrize("layer", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (9, 4, 12), (16384, 6, 128)], ids=str)
def test_norm_and_rotate(sizes: tuple[int, int, int], layer: tuple[bool, bool]) -> None:
    for values in VALUES:
        checks.check_norm_and_rotate(sizes, layer, BF16, values, "cuda", "cuda")


@pytest.mark.parametrize("sizes", [(8, 8, 16), (150, 72, 312), (16384, 768, 3072)], ids=str)
def test_relu_squared(sizes: tuple[int, int, int]) -> None:
    for values in VALUES:
        checks.check_relu_squared(sizes, BF16, values, "cuda")


@fp8_units
@pytest.mark.parametrize("sizes", [(16, 16, 16), (150, 80, 304), (16384, 768, 3072)], ids=str)
def test_relu_squared_fp8(sizes: tuple[int, int, int]) -> None:
    for values in VALUES:
        checks.check_relu_squared_fp8(sizes, BF16, values, "cuda")


@pytest.mark.parametrize("T, V", [(1, 3), (65, 1030), (330, 2100), (2048, 50304)])
def test_loss(T: int, V: int) -> None:
    for values in VALUES:
        checks.check_loss(T, V, 4, BF16, values, "cuda", "cuda")


@fp8_units
def test_fp8_is_rounded_to_nearest() -> None:
    checks.check_quantize_in_fp8("cuda")


@fp8_units
@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("T, V", checks.FP8_LOSS_SHAPES, ids=str)
def test_loss_in_fp8(T: int, V: int, K: int) -> None:
    for values in VALUES:
        checks.check_loss_in_fp8(T, V, K, BF16, values, "cuda", "cuda")


@pytest.mark.parametrize("shape", [(1, 5), (130, 70), (49152, 768)], ids=str)
def test_quantize(shape: tuple[int, int]) -> None:
    checks.check_quantize(shape, BF16, "cuda")


@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (50304, 768), (768, 50304)], ids=str)
def test_transposes(shape: tuple[int, int]) -> None:
    checks.check_transpose(shape, BF16, "cuda", "cuda")


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (70, 30, 40), (16384, 50304, 768), (49152, 50304, 768)], ids=str
)
def test_lookup(sizes: tuple[int, int, int]) -> None:
    for most in (0.05, 1.0):
        checks.check_lookup(sizes, BF16, "cuda", "cuda", most)


@fp8_units
def test_loss_at_the_record_does_not_overflow_and_repeats_itself() -> None:
    """49152 x 50304 elements are more than int32 counts: the last rows, and every bit again."""
    T, V, last = 49152, 50304, 256
    scale = train_gpt.FP8_GRAD_SCALE
    logits = torch.randn(T, V, device="cuda", dtype=BF16) * 4
    targets = torch.randint(V, (T, 4), device="cuda")
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25], device="cuda")
    run = lambda: tk.loss_and_fp8_gradient(logits, targets, weights, scale)
    first, second = run(), run()
    for a, b in zip(first[1:], second[1:]):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(first[0], second[0])
    grad, grad_t = first[1][-last:], first[2][:, -last:]
    assert torch.equal(grad_t.view(torch.uint8), grad.view(torch.uint8).mT)
    rows = logits[-last:], targets[-last:]
    exact = checks.exact_loss(*rows, weights)[1] / scale
    checks.assert_within(grad.float(), exact, checks.fp8_gradient_bound(*rows, exact))


@pytest.mark.parametrize("shape", [(5, 768, 768), (3, 3072, 768)], ids=str)
def test_polar_express_is_that_of_fp64(shape: tuple[int, ...]) -> None:
    G = torch.randn(shape, device="cuda")
    found, exact = train_gpt.polar_express(G), train_gpt.polar_express(G.double())
    assert (found.double() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("p", [1, 2], ids=["plain", "paired"])
def test_attention_is_that_of_its_reference(p: int) -> None:
    """As the model calls it, in every window of the schedule, with the FlashAttention that trains."""
    T, h = 4096, train_gpt.Hyperparameters()
    starts = p * int32(0, 700, 701, 1500, 3548, *[T] * 4).cuda()
    stages = (*train_gpt.STAGES, train_gpt.EXTENSION, train_gpt.FINAL_VALIDATION)
    windows = {x * h.block_size for stage in stages for x in (stage.short, stage.long)}
    *qkv, grad = (
        tk.norm(normal(name, (p * T, h.num_heads // p, h.head_dim)).cuda()).bfloat16()
        for name in ("q", "k", "v", "grad")
    )
    tk.flash_attention()
    for window in windows:
        band = tk.Band(starts, window, p * 2048, None)
        results = []
        for attend, dtype in ((tk.attend, BF16), (tk.masked_attention, torch.float64)):
            leaves = [x.to(dtype).requires_grad_() for x in qkv]
            out = attend(*leaves, band, 0.1)
            results.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
        for found, exact in zip(*results):
            # Rounded once, after probabilities and their gradients have been rounded too.
            assert (found.double() - exact).norm() <= 4 * 2.0**-8 * exact.norm(), window


def test_model_as_it_trains_is_that_of_fp32_on_a_cpu() -> None:
    """Loss and gradients in bf16, FP8 and one compiled graph; FP8 in the reference too."""
    h, T = train_gpt.Hyperparameters(), 2048
    models = [train_gpt.GPT(h, fp8=HAS_FP8) for _ in range(2)]
    with torch.no_grad():
        for label, param in models[0].named_parameters():
            if param.ndim > 1:
                param.add_(0.02 * normal(label, tuple(param.shape)))
        scalars = models[0].scalars
        scalars.add_(0.5 * (scalars == 0))  # a gate times 0 would have no gradient
    models[1].load_state_dict(models[0].state_dict())
    models[0].cuda()
    models[1].float()
    train_gpt.compile_model(models[0])
    batch = random_batch(T, h.vocab_size, (0, 700, 701, 1500), slots=64)
    losses = []
    for model in models:
        device = model.embed.device
        weights = torch.tensor([1.0, 0.5], device=device)
        schedule = train_gpt.ForwardSchedule(weights, 3 * h.block_size, 7 * h.block_size, 2048)
        loss = model(*(x.to(device) for x in batch), schedule)
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] / losses[1] - 1) <= 5e-3
    # bf16 keeps 8 bits, and the layers lose some of them; a gate sums small differences.
    for (label, found), exact in zip(models[0].named_parameters(), models[1].parameters()):
        error = (found.grad.double().cpu() - exact.grad).norm()
        assert error <= 0.2 * exact.grad.norm(), label
