import pytest

from orca_jax.iteration.shape import bucket_for, bucket_sizes


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 63, 64, 65, 100, 512, 1000, 2048, 5000, 1 << 20])
def test_sizes_ascend_to_the_maximum(max_tokens):
    sizes = bucket_sizes(max_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_tokens


def test_padding_is_bounded():
    sizes = bucket_sizes(4096)
    for n in range(1, 4097):
        padding = bucket_for(n, sizes) - n
        assert 0 <= padding < 8 if n < 64 else 0 <= padding <= n / 4


def test_few_programs_and_powers_of_two_among_them():
    sizes = bucket_sizes(2048)
    # Within a quarter of the real tokens, 25 are the fewest there can be with 1 among them.
    assert len(sizes) == 29
    assert {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048} <= set(sizes)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 33, 64, 65, 100, 512, 1000, 2048, 5000, 1 << 20])
def test_coarse_sizes_ascend_to_the_maximum(max_tokens):
    sizes = bucket_sizes(max_tokens, coarse=True)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_tokens
    assert set(sizes) <= {*bucket_sizes(max_tokens)}  # what a CPU has, some left out


def test_coarse_sizes_are_sixteen_and_pad_by_under_a_quarter_on_average():
    sizes = bucket_sizes(2048, coarse=True)
    assert sizes[:7] == (1, 8, 16, 32, 48, 64, 96) and len(sizes) == 16
    padding = {n: bucket_for(n, sizes) / n - 1 for n in range(1, 2049)}
    assert max(padding[n] for n in range(33, 2049)) <= 0.5
    above = [padding[n] for n in range(17, 2049)]
    assert sum(above) / len(above) < 0.20
    # Small iterations are as frequent as large ones: each octave counts alike.
    octaves = [[padding[n] for n in range(low + 1, 2 * low + 1)] for low in (16, 32, 64, 128, 256, 512, 1024)]
    assert sum(sum(octave) / len(octave) for octave in octaves) / len(octaves) < 0.25


def test_bucket_for_is_the_smallest_that_holds():
    sizes = (1, 8, 16)
    assert [bucket_for(n, sizes) for n in (1, 2, 8, 9, 16)] == [1, 8, 8, 16, 16]
    for outside in (0, 17):
        with pytest.raises(AssertionError, match="buckets up to 16"):
            bucket_for(outside, sizes)
