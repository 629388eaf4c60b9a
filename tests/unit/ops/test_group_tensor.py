"""Weights in groups: the values that their codes, scales and offsets give."""

import pytest
import torch
from octavo_engine.ops.group_tensor import Codes, GroupFormat, GroupTensor, Offsets, expand_groups, pack_nibbles

OUT, IN, GROUP = 5, 192, 64
TABLE = torch.linspace(-1, 1, 16) ** 3


@pytest.mark.parametrize(
    ("codes", "offsets"),
    [("int4", "none"), ("int4", "zeros"), ("int4", "minimums"), ("int8", "none"), ("e4m3", "none"), ("table4", "none")],
)
def test_a_value_is_its_code_times_the_scale_of_its_group(codes: Codes, offsets: Offsets) -> None:
    generator = torch.Generator().manual_seed(1)
    most = 16 if codes in ("int4", "table4") else 127  # e4m3's code 127 is NaN
    numbers = torch.randint(0, most, (OUT, IN), generator=generator, dtype=torch.uint8)
    scales = torch.rand(IN // GROUP, OUT, generator=generator).half()
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
    minimums = -torch.rand(scales.shape, generator=generator).half()
    weight = GroupTensor(
        format=GroupFormat(name="tried", codes=codes, group_size=GROUP, offsets=offsets),
        codes=pack_nibbles(numbers) if most == 16 else numbers,
        scales=scales,
        offsets={"none": None, "zeros": zeros, "minimums": minimums}[offsets],
        table=TABLE if codes == "table4" else None,
    )
    assert weight.shape == (OUT, IN)
    expanded = expand_groups(weight, torch.bfloat16)
    for row, column in ((0, 0), (1, 15), (2, 16), (3, 63), (4, 64), (0, 191)):
        code, at = int(numbers[row, column]), (column // GROUP, row)
        number = float(TABLE[code]) if codes == "table4" else float(code)
        if codes == "e4m3":
            number = torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).item()
        if offsets == "minimums":
            value = number * scales[at].double() + minimums[at].double()
        else:
            zero = int(zeros[at]) if offsets == "zeros" else 8 if codes == "int4" else 0
            value = (number - zero) * scales[at].double()
        assert expanded[row, column].item() == value.float().bfloat16().item()


def test_codes_of_a_transposed_weight_are_packed_as_those_of_a_copy() -> None:
    codes = torch.randint(0, 16, (64, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(pack_nibbles(codes), pack_nibbles(codes.contiguous()))
