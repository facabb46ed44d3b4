"""The checksum sees every byte, its place and its name, and nothing else."""

import pytest
import torch

from trinity_dask.weights import checksum as checksums
from trinity_dask.weights.checksum import BLOCK_WORDS, Digest, checksum


@pytest.fixture(autouse=True, params=["cpu", "accelerator"])
def _device(request, monkeypatch):
    """Both ways to hash a tensor have the same properties; the second one runs here too."""
    if request.param == "accelerator":
        monkeypatch.setattr(checksums, "_on_cpu", lambda data: False)


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 5), "b": (BLOCK_WORDS, 5), "c": (7,), "d": (2 * BLOCK_WORDS,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def test_value_is_a_63_bit_integer_and_repeatable():
    value = checksum(weights())
    assert 0 <= value < 2**63
    assert value == checksum(weights())
    assert value != checksum(weights(seed=1))


def test_order_of_names_does_not_matter():
    assert checksum(weights()) == checksum(reversed(weights()))


def test_a_name_belongs_to_its_tensor():
    (a, x), (b, y) = ("a", torch.ones(4)), ("b", torch.zeros(4))
    assert checksum([(a, x), (b, y)]) != checksum([(a, y), (b, x)])


@pytest.mark.parametrize("place", [0, 1, BLOCK_WORDS * 2, BLOCK_WORDS * 5 - 1])
def test_one_changed_element_changes_the_value(place):
    named = weights()
    before = checksum(named)
    flat = named[1][1].view(-1)
    flat[place] = torch.nextafter(flat[place], torch.tensor(9e9))
    assert checksum(named) != before


@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, BLOCK_WORDS * 2 + 1), (0, BLOCK_WORDS * 5 - 1)])
def test_two_swapped_elements_change_the_value(i, j):
    named = weights()
    before = checksum(named)
    flat = named[1][1].view(-1)
    flat[i], flat[j] = flat[j].clone(), flat[i].clone()
    assert checksum(named) != before


def test_swapped_blocks_change_the_value():
    x = torch.arange(4 * BLOCK_WORDS, dtype=torch.float32)
    y = x.view(2, -1).flip(0).reshape(-1)
    assert checksum([("x", x)]) != checksum([("x", y)])


def test_shape_and_dtype_count():
    x = torch.zeros(4, 6)
    assert checksum([("x", x)]) != checksum([("x", x.view(6, 4))])
    assert checksum([("x", x)]) != checksum([("x", x.to(torch.int32))])


def test_layout_in_memory_does_not_count():
    x = torch.randn(6, 8)
    expected = checksum([("x", x)])
    assert checksum([("x", x.T.contiguous().T)]) == expected
    shifted = torch.empty(200, dtype=torch.uint8)[3 : 3 + 192]
    shifted.copy_(x.view(-1).view(torch.uint8))
    with pytest.raises(RuntimeError):
        shifted.view(torch.float32)  # the bytes really are unaligned
    assert checksum([("x", shifted)]) == checksum([("x", x.view(-1).view(torch.uint8))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 3, 8, 1001])
def test_any_dtype_and_length(dtype, n):
    x = torch.arange(n).to(dtype)
    assert checksum([("x", x)]) == checksum([("x", x.clone())])
    if n:
        y = x.clone()
        y[-1] = 1 - y[-1].to(torch.float32)
        assert checksum([("x", x)]) != checksum([("x", y)])


def test_digest_counts_bytes():
    digest = Digest()
    for name, tensor in weights():
        digest.add(name, tensor)
    assert digest.n_bytes == sum(4 * tensor.numel() for _, tensor in weights())
    assert digest.value == checksum(weights())
