"""Hashes of KV blocks: the engine's cache keys, which the router looks up, so both must compute the same bytes.

Definition and test vectors: `docs/reference/block-hash.md`. A block's hash covers everything its KV depends on: the
weights, the KV dtype, the block size, the adapter, the tenant's salt and every token before it. It covers content only:
no path, revision, counter or process seed, so that independent replicas compute equal hashes.

A root consists of a base part, which a replica publishes once, and a scope part (adapter, salt), which is added per
request; if the scope is empty, the root equals the base.
"""

import functools
import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256

BASE_LABEL = b"octavo-kv1"
SCOPE_LABEL = b"octavo-kv1-scope"
SALT_LABEL = b"octavo-salt1"
TENANT_LABEL = b"octavo-tenant1"
HASH_BYTES = 32
SHORT_BYTES = 8
UNNAMED_CHARS = 16


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


_HASH_HEAD = _u32(HASH_BYTES)


def _digest(*fields: bytes) -> bytes:
    """SHA-256 over length-prefixed fields, so that different lists of fields never give the same bytes."""
    return sha256(b"".join(part for field in fields for part in (_u32(len(field)), field))).digest()


@functools.cache
def _block_layout(block_size: int) -> struct.Struct:
    """Return the `struct` layout of the bytes that are hashed for a block without extra bytes."""
    return struct.Struct(f"<I{HASH_BYTES}sI{4 * block_size}sI")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def root_hash(weights_fingerprint: str, kv_dtype: str, block_size: int, adapter: str = "", salt: str = "") -> bytes:
    """The hash that precedes a sequence's first block. `adapter`: hash of the adapter's content, not its name."""
    base = _digest(BASE_LABEL, weights_fingerprint.encode(), kv_dtype.encode(), _u32(block_size))
    return scoped_root(base, adapter, salt)


def scoped_root(base: bytes, adapter: str = "", salt: str = "") -> bytes:
    """Add a scope to a base root: `scoped_root(root_hash(w, d, b), a, s) == root_hash(w, d, b, a, s)`."""
    if not adapter and not salt:
        return base
    return _digest(SCOPE_LABEL, base, adapter.encode(), salt.encode())


def tenant_salt(tenant: str, cache_salt: str = "") -> str:
    """Derive a request's salt from `tenant` (its key's name, or "" if tenants share) and the request's `cache_salt`.

    A tenant can divide its own cache further but never reach another tenant's: the name is always part of the hash.
    """
    if not tenant and not cache_salt:
        return ""
    return _digest(SALT_LABEL, tenant.encode(), cache_salt.encode()).hex()


def salted_digest(digest: bytes, salt: str) -> bytes:
    """Return an image's digest for requests with a salt; they then share no cached results with other requests."""
    return _digest(SALT_LABEL, digest, salt.encode()) if salt else digest


def unnamed_tenant(key: str) -> str:
    """Return the tenant name of an API key without a name; it depends only on the key, so all replicas agree."""
    return "key-" + _digest(TENANT_LABEL, key.encode()).hex()[:UNNAMED_CHARS]


def next_hash(prev: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash the full block `tokens` after `prev`. `extra`: other inputs of its KV, such as an image."""
    data = _token_bytes(tokens)
    return sha256(_HASH_HEAD + prev + _u32(len(data)) + data + _u32(len(extra)) + extra).digest()


def image_extra(images: Iterable[tuple[int, int, bytes]], first: int, end: int) -> bytes:
    """Return `extra` for the block of tokens [first, end). `images`: each image's first token, end and digest."""
    return b"".join(
        digest + (first - start).to_bytes(4, "little", signed=True)
        for start, stop, digest in images
        if start < end and first < stop
    )


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hash the full blocks of a sequence; a partly filled last block has no hash."""
    return chained_hashes(root, _token_bytes(token_ids), block_size)


def chained_hashes(prev: bytes, data: bytes, block_size: int) -> list[bytes]:
    """Hash the full blocks in `data`, tokens as little-endian u32, that follow the block with the hash `prev`."""
    width, pack = 4 * block_size, _block_layout(block_size).pack
    blocks = struct.iter_unpack(f"{width}s", data[: len(data) - len(data) % width])
    return [prev := sha256(pack(HASH_BYTES, prev, width, tokens, 0)).digest() for (tokens,) in blocks]


def short_hash(block_hash: bytes) -> bytes:
    """Shorten a hash to the 8 bytes that are sent over the wire, enough to distinguish the blocks of one service."""
    return block_hash[:SHORT_BYTES]
