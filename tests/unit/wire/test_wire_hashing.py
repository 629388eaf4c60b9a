"""The block hash against published vectors and an independent implementation, and its laws."""

import hashlib
import re
import struct
from pathlib import Path

import pytest
from octavo_engine.wire.hashing import (
    block_hashes,
    image_extra,
    next_hash,
    root_hash,
    scoped_root,
    short_hash,
    tenant_salt,
    unnamed_tenant,
)

BASE = root_hash("sha256:0123", "float32", 4)
BLOCK_0 = next_hash(BASE, [1, 2, 3, 4])
TENANT_ROOT = scoped_root(BASE, salt=tenant_salt("sk-alice"))

IMAGES = [(2, 7, hashlib.sha256(b"image-a").digest())]
BLOCK_0_IMAGE = next_hash(BASE, [1, 2, 9, 9], image_extra(IMAGES, 0, 4))

COMPUTED = {
    "base": BASE,
    "base-bf16": root_hash("sha256:0123", "bfloat16", 16),
    "root-adapter": scoped_root(BASE, adapter="lora:42"),
    "root-salt": scoped_root(BASE, salt="tenant-a"),
    "root-both": scoped_root(BASE, "lora:42", "tenant-a"),
    "salt-tenant": bytes.fromhex(tenant_salt("sk-alice")),
    "salt-tenant-own": bytes.fromhex(tenant_salt("sk-alice", "session-7")),
    "salt-own": bytes.fromhex(tenant_salt("", "session-7")),
    "block-0": BLOCK_0,
    "block-1": next_hash(BLOCK_0, [5, 6, 7, 8]),
    "block-1-extra": next_hash(BLOCK_0, [5, 6, 7, 8], b"image:abc"),
    "block-0-tenant": next_hash(TENANT_ROOT, [0, 4294967295, 49151, 65536]),
    "block-0-image": BLOCK_0_IMAGE,
    "block-1-image": next_hash(BLOCK_0_IMAGE, [9, 9, 9, 5], image_extra(IMAGES, 4, 8)),
}

VECTORS = {
    "base": "b7da755d795255eb161fe991a3aa0673f0606c1c4591e014d712eff3ae210d5c",
    "base-bf16": "cfb0a7c3004f98336bad950c2c7fa6e3f683621b87020e482c1c967a0cde15bd",
    "root-adapter": "d2390101d1400f03c967dcd4fbe38f75409ddb65164dbf63ad8bebde5fef680d",
    "root-salt": "92fa647784b0badfdc340443ab383d0994e6a9c1e1c151af60204343fc4b6809",
    "root-both": "848fbfbc27975576bafe760f4cc88a7c912241248f0c361e88ff6d84fb4e5e6d",
    "salt-tenant": "54b1e28ff2e73987bbf1839a7b5c2f270e321624ed366d74e7828c742773b7de",
    "salt-tenant-own": "b3813c4f2483fa0f1330a32ee6eee4f26bc488d1873f701af0c86aebe748fdf0",
    "salt-own": "a15a322b4cda8e1d2ad1af40358cf02a9dd301bba3b9ce226fe5ac6bf6bd44ee",
    "block-0": "cca6f59e2e089203373fab2202d4794de1254104f3afc642a1d334e577282613",
    "block-1": "09e4a33e33031662bd8017323221b131faa297ddf7d34a3864727c93517f41d2",
    "block-1-extra": "8ef4827d88622ec3c8aff378f0e59913a81860be59808e979b8714f10ecde4db",
    "block-0-tenant": "3959fa4e934d248dd43c386ee4561eef75ed8e52c1f20ca61fcb9aeb73612a69",
    "block-0-image": "8686b463bcc6e6dd14f7d312ebe3d8bc05344291b43ce9ec6e4981d4d2daccaf",
    "block-1-image": "2316e111eebf54188029cc267f99cb35203d6748267f74d1a448845a615cb228",
}


def _digest(*fields: bytes) -> bytes:
    return hashlib.sha256(b"".join(struct.pack("<I", len(f)) + f for f in fields)).digest()


@pytest.mark.parametrize("name", VECTORS)
def test_published_vectors_match(name: str) -> None:
    assert COMPUTED[name].hex() == VECTORS[name]


def test_the_documentation_publishes_these_vectors() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "block-hash.md").read_text()
    assert dict(re.findall(r"^\| (\S+) \|.*\| `([0-9a-f]{64})` \|$", page, re.MULTILINE)) == VECTORS


def test_an_independent_implementation_agrees() -> None:
    base = _digest(b"octavo-kv1", "gewichte-ü".encode(), b"float16", struct.pack("<I", 2))
    root = _digest(b"octavo-kv1-scope", base, b"adapter", b"salt")
    first = _digest(root, struct.pack("<2I", 7, 8), b"")
    second = _digest(first, struct.pack("<2I", 9, 70000), b"")
    assert block_hashes(root_hash("gewichte-ü", "float16", 2, "adapter", "salt"), [7, 8, 9, 70000, 1], 2) == [
        first,
        second,
    ]
    assert tenant_salt("k", "c") == _digest(b"octavo-salt1", b"k", b"c").hex()


def test_an_independent_implementation_agrees_on_images() -> None:
    digest = hashlib.sha256(b"image-a").digest()
    first = _digest(BASE, struct.pack("<4I", 1, 2, 9, 9), digest + struct.pack("<i", -2))
    second = _digest(first, struct.pack("<4I", 9, 9, 9, 5), digest + struct.pack("<i", 2))
    assert (first.hex(), second.hex()) == (VECTORS["block-0-image"], VECTORS["block-1-image"])


def test_the_extra_of_a_block_has_each_image_with_a_token_in_it() -> None:
    a, b = b"a" * 32, b"b" * 32
    images = [(2, 4, a), (5, 9, b)]
    extras = [image_extra(images, first, first + 4) for first in (0, 4, 8, 12)]
    assert extras == [a + struct.pack("<i", -2), b + struct.pack("<i", -1), b + struct.pack("<i", 3), b""]
    assert image_extra(images, 2, 6) == a + struct.pack("<i", 0) + b + struct.pack("<i", -3)
    assert image_extra([], 0, 4) == b""


@pytest.mark.parametrize(("adapter", "salt"), [("", ""), ("a", ""), ("", "s"), ("a", "s")])
def test_scope_composes(adapter: str, salt: str) -> None:
    assert scoped_root(root_hash("w", "d", 16), adapter, salt) == root_hash("w", "d", 16, adapter, salt)


def test_different_inputs_never_give_equal_hashes() -> None:
    roots = [
        root_hash("ab", "c", 16),
        root_hash("a", "bc", 16),
        root_hash("ab", "c", 17),
        root_hash("ab", "c", 16, "x", ""),
        root_hash("ab", "c", 16, "", "x"),
        root_hash("ab", "c", 16, "xy", "z"),
        root_hash("ab", "c", 16, "x", "yz"),
    ]
    assert len(set(roots)) == len(roots)
    assert tenant_salt("ab", "c") != tenant_salt("a", "bc")
    assert next_hash(BASE, [1], b"") != next_hash(BASE, [], struct.pack("<I", 1))


def test_only_full_blocks_are_hashed() -> None:
    assert block_hashes(BASE, [], 4) == block_hashes(BASE, [1, 2, 3], 4) == []
    assert block_hashes(BASE, [1, 2, 3, 4, 5, 6, 7], 4) == [BLOCK_0]
    assert len(block_hashes(BASE, list(range(8)), 4)) == 2


def test_block_hashes_chain_next_hash() -> None:
    ids, prev = list(range(64)), BASE
    for block, hashed in enumerate(block_hashes(BASE, ids, 16)):
        prev = next_hash(prev, ids[16 * block : 16 * block + 16])
        assert hashed == prev


def test_a_token_that_does_not_fit_is_refused() -> None:
    with pytest.raises(struct.error):
        next_hash(BASE, [-1])
    with pytest.raises(struct.error):
        next_hash(BASE, [2**32])


def test_no_tenant_and_no_salt_share_the_cache() -> None:
    assert tenant_salt("") == ""
    assert scoped_root(BASE, salt=tenant_salt("")) == BASE


def test_a_tenant_reaches_only_its_own_part() -> None:
    """A tenant cannot reach another part even by sending another tenant's salt."""
    theirs = {tenant_salt("alice"), tenant_salt("alice", "session")}
    sent = ["", "alice", "session", *theirs]
    assert not theirs & {tenant_salt(tenant, salt) for tenant in ("bob", "") for salt in sent}


def test_an_unnamed_key_gets_a_stable_name() -> None:
    name = unnamed_tenant("sk-alice")
    assert name == "key-" + _digest(b"octavo-tenant1", b"sk-alice").hex()[:16]
    assert f"`{name}`" in (Path(__file__).parents[3] / "docs" / "reference" / "block-hash.md").read_text()


def test_a_short_hash_has_eight_bytes() -> None:
    assert short_hash(BLOCK_0) == BLOCK_0[:8]
