#!/usr/bin/env python3
"""Read a snapshot file: check every byte of it, and say as JSON what it holds.

Written from docs/snapshot-format.md, with nothing of Baton's own code; Python's standard library only.

  read_snapshot.py FILE            header, frames and sections; exit 1 with the reason where a check fails
  read_snapshot.py --rows FILE     also each position: id and SHA-256 of its rows
  read_snapshot.py --chain FILE    with the positions below the base, from the parents beside the file
"""
import argparse
import hashlib
import json
import os
import struct
import sys

BLOCK = 4096
MAX_POSITIONS = 1 << 24
MAX_POSITION_BYTES = 1 << 26
PRECISIONS = {0: "f32", 1: "f16", 2: "q8"}
SECTIONS = {1: ("logits", 4 * (1 << 20)), 2: ("session", 1 << 20)}


class Refused(Exception):
    pass


def need(condition, reason):
    if not condition:
        raise Refused(reason)


def make_table():
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


TABLE = make_table()


def crc32c(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def u32(data, at):
    return struct.unpack_from("<I", data, at)[0]


def u64(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def round_up(n):
    return (n + BLOCK - 1) // BLOCK * BLOCK


def place(end, before):
    return round_up(end + before) - before


def sha256(*parts):
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return h.digest()


class Prefix:
    """D(p) for rising p."""

    def __init__(self, namespace, f):
        self.border, self.f, self.n, self.ids = sha256(namespace), f, 0, b""

    def digest(self):
        return sha256(self.border, self.ids) if self.ids else self.border

    def feed(self, ids):
        for at in range(0, len(ids), 4):
            self.ids += ids[at:at + 4]
            self.n += 1
            if self.n % self.f == 0:
                self.border, self.ids = sha256(self.border, self.ids), b""


class Snapshot:
    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            self.data = f.read()
        self.read_footer()
        self.read_header()
        self.read_index()
        self.read_sections()
        self.check_root()
        self.read_frames()

    def seed(self, position):
        return crc32c(self.id + struct.pack("<I", position))

    def check_crc(self, record, seed, name):
        is_, want = u32(record, 4), crc32c(record[8:], seed)
        need(is_ == want, f"{name} CRC is {is_:08x}, computed {want:08x}")
        return is_

    def zeros(self, begin, end, before):
        need(begin <= end, f"{before} begins inside the record before it")
        need(not any(self.data[begin:end]), f"the gap before the {before} is not zero")

    def read_footer(self):
        size = len(self.data)
        need(size % BLOCK == 0 and size >= 3 * BLOCK, f"the file is {size} bytes: whole blocks, at least 3")
        footer = self.data[-BLOCK:]
        need(footer[:4] == b"BKVZ", "footer magic")
        self.check_crc(footer, 0, "footer")
        self.n, self.n_frames, self.n_sections, self.header_bytes = struct.unpack_from("<IIII", footer, 8)
        self.root, self.id = footer[24:56], footer[56:72]
        self.index_at, self.index_bytes, length = struct.unpack_from("<QQQ", footer, 72)
        need(length == size, f"footer: length is {length}, the file's {size}")
        need(self.n <= MAX_POSITIONS, "footer: positions")
        need(self.n_sections <= 2, "footer: sections")
        need(not any(footer[96 + 24 * self.n_sections:]), "footer: bytes after the section table")
        need(self.index_bytes == 16 + 56 * self.n_frames, "footer: index length")
        need(self.index_at % BLOCK == 0, "footer: index offset")
        need(round_up(self.index_at + self.index_bytes) == size - BLOCK, "footer: index offset")
        need(224 <= self.header_bytes <= min(self.index_at, 224 + 4 * self.n), "footer: header length")
        self.sections = []
        for i in range(self.n_sections):
            offset, kind, length, crc, zero = struct.unpack_from("<QIIII", footer, 96 + 24 * i)
            need(zero == 0, "footer: zero in the section table")
            self.sections.append({"offset": offset, "kind": kind, "length": length, "crc": crc})

    def read_header(self):
        h = self.data[:self.header_bytes]
        need(h[:4] == b"BKVH", "header magic")
        need(u32(h, 8) & 0xFFFF == 1, f"version {u32(h, 8) & 0xFFFF}")
        self.base = u32(h, 168)
        need(self.base <= MAX_POSITIONS, "header: base")
        need(u32(h, 12) == len(h) == 224 + 4 * self.base, "header length")
        self.header_crc = self.check_crc(h, 0, "header")
        need(u64(h, 16) == 0, "header: required features")
        need(u32(h, 172) == 0, "header: zero")
        need(h[32:48] == self.id, "header: snapshot id is not the footer's")
        self.fingerprint, self.namespace, self.numerics = h[48:80], h[80:112], h[112:144]
        self.layers, self.heads, self.dim, precision, self.f, self.bound = struct.unpack_from("<IIIIII", h, 144)
        need(precision in PRECISIONS, f"header: precision {precision}")
        self.precision = PRECISIONS[precision]
        need(self.layers > 0 and self.heads > 0 and 0 < self.dim <= 4096, "header: geometry")
        need(self.precision != "q8" or self.dim % 32 == 0, "header: head size of q8")
        row = {"f32": 4 * self.dim, "f16": 2 * self.dim, "q8": self.dim + self.dim // 16}[self.precision]
        self.position = self.layers * 2 * self.heads * row
        need(self.position <= MAX_POSITION_BYTES, "header: bytes of a position")
        f = 1
        while 2 * f * self.position <= 1 << 20:
            f *= 2
        need(self.f == f, f"header: F is {self.f}, of this geometry {f}")
        need(self.base <= self.n <= self.bound <= MAX_POSITIONS, "header: base, positions, bound")
        self.parent = h[176:192]
        need(self.base > 0 or not any(self.parent), "header: a parent without a base")
        self.prefix = Prefix(self.namespace, self.f)
        self.base_ids = h[224:]
        self.prefix.feed(self.base_ids)
        self.base_digest = h[192:224]
        need(self.base_digest == self.prefix.digest(), "header: D(base)")

    def read_index(self):
        index = self.data[self.index_at:self.index_at + self.index_bytes]
        need(index[:4] == b"BKVI", "index magic")
        self.check_crc(index, self.seed(self.n), "index")
        need(u32(index, 8) == self.n_frames and u32(index, 12) == 0, "index: frames")
        self.frames, end, at = [], self.header_bytes, self.base
        for i in range(self.n_frames):
            offset, first, count, crc, zero = struct.unpack_from("<QIIII", index, 16 + 56 * i)
            want = min(self.f - at % self.f, self.n - at)
            need(zero == 0 and first == at and count == want > 0, f"index: frame {i}")
            need(offset == place(end, 48 + 4 * count), f"index: place of frame {i}")
            self.frames.append({"offset": offset, "first": first, "count": count, "crc": crc,
                                "digest": index[40 + 56 * i:72 + 56 * i], "gap": end})
            end, at = offset + 48 + count * (4 + self.position), at + count
        need(at == self.n, "index: positions")
        self.end = end

    def read_sections(self):
        end, last = self.end, 0
        for s in self.sections:
            need(s["kind"] in SECTIONS and s["kind"] > last, f"footer: section kind {s['kind']}")
            name, most = SECTIONS[s["kind"]]
            need(s["length"] <= most, f"footer: length of section {name}")
            need(s["kind"] != 1 or (s["length"] > 0 and s["length"] % 4 == 0), "footer: length of logits")
            need(s["offset"] == place(end, 16), f"footer: place of section {name}")
            record = self.data[s["offset"]:s["offset"] + 16 + s["length"]]
            need(record[:4] == b"BKVS", f"section {name} magic")
            need(self.check_crc(record, self.seed(self.n), f"section {name}") == s["crc"], f"section {name}")
            need(u32(record, 8) == s["kind"] and u32(record, 12) == s["length"], f"section {name}")
            self.zeros(end, s["offset"], f"section {name}")
            s["data"], last = record[16:], s["kind"]
            end = s["offset"] + 16 + s["length"]
        need(self.index_at == round_up(end), "footer: index offset")
        self.zeros(end, self.index_at, "index")
        self.zeros(self.index_at + self.index_bytes, len(self.data) - BLOCK, "footer")

    def check_root(self):
        h = hashlib.sha256(struct.pack("<I", self.header_crc))
        for f in self.frames:
            h.update(struct.pack("<II", f["first"], f["count"]) + f["digest"] + struct.pack("<I", f["crc"]))
        for s in self.sections:
            h.update(struct.pack("<III", s["kind"], s["length"], s["crc"]))
        need(h.digest() == self.root, "footer: root")

    def read_frames(self):
        for i, f in enumerate(self.frames):
            count, at = f["count"], f["offset"]
            record = self.data[at:at + 48 + count * (4 + self.position)]
            need(record[:4] == b"BKVF", f"frame {i} magic")
            need(self.check_crc(record, self.seed(f["first"]), f"frame {i}") == f["crc"], f"frame {i}: index")
            need(struct.unpack_from("<II", record, 8) == (f["first"], count), f"frame {i}: positions")
            self.zeros(f["gap"], at, f"frame {i}")
            f["ids"], f["rows"] = record[48:48 + 4 * count], record[48 + 4 * count:]
            self.prefix.feed(f["ids"])
            need(record[16:48] == self.prefix.digest() == f["digest"], f"frame {i}: digest")

    def positions(self):
        """(position, id, rows) of each that the file holds."""
        for f in self.frames:
            for k in range(f["count"]):
                yield f["first"] + k, u32(f["ids"], 4 * k), f["rows"][k * self.position:(k + 1) * self.position]

    def find_parent(self):
        folder = os.path.dirname(self.path)
        for suffix in (".kv", ".base"):
            path = os.path.join(folder, self.parent.hex() + suffix)
            if os.path.exists(path):
                return Snapshot(path)
        raise Refused(f"parent {self.parent.hex()} is not beside {os.path.basename(self.path)}")

    def chain(self):
        """As positions(), with those below the base."""
        if self.base > 0:
            parent = self.find_parent()
            need(parent.id == self.parent and parent.namespace == self.namespace, "the parent is another")
            need(parent.n >= self.base, "the parent ends before the base")
            prefix = Prefix(self.namespace, self.f)
            for position, id_, rows in parent.chain():
                if position < self.base:
                    prefix.feed(struct.pack("<I", id_))
                    yield position, id_, rows
            need(prefix.digest() == self.base_digest, "D(base) is not the parent's")
        yield from self.positions()


def describe(s):
    return {
        "id": s.id.hex(), "parent": s.parent.hex() if s.base else None, "base": s.base, "positions": s.n,
        "bound": s.bound, "layers": s.layers, "kv_heads": s.heads, "head_dim": s.dim, "precision": s.precision,
        "frame_positions": s.f, "fingerprint": s.fingerprint.hex(), "namespace": s.namespace.hex(),
        "numerics_id": s.numerics.hex(), "root": s.root.hex(), "bytes": len(s.data),
        "frames": [{"first": f["first"], "count": f["count"], "offset": f["offset"]} for f in s.frames],
        "sections": [{"kind": SECTIONS[x["kind"]][0], "bytes": x["length"],
                      "sha256": sha256(x["data"]).hex()} for x in s.sections],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="also each position")
    parser.add_argument("--chain", action="store_true", help="also those below the base; implies --rows")
    parser.add_argument("file")
    args = parser.parse_args()
    try:
        s = Snapshot(args.file)
        out = describe(s)
        if args.rows or args.chain:
            source = s.chain() if args.chain else s.positions()
            out["rows"] = [{"position": p, "id": i, "sha256": sha256(r).hex()} for p, i, r in source]
    except (Refused, OSError, struct.error) as e:
        print(f"{os.path.basename(args.file)}: {e}", file=sys.stderr)
        return 1
    json.dump(out, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
