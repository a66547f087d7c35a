#!/usr/bin/env bash
# The reader that was written from docs/snapshot-format.md alone, over what Baton writes.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

reader=$SOURCE/tests/tools/read_snapshot.py
golden=$SOURCE/tests/golden

python() { expect_exit 0 env PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$SOURCE/tests/tools" GOLDEN="$golden" python3 "$@"; }

# check_positions FILES FOLDER: tests/kv_help.h says how the rows of a position follow from the namespace and the ids up
# to it.
check_positions() {
    cat >"$work/check.py" <<'END'
import glob, struct, sys
from read_snapshot import Snapshot

M = (1 << 64) - 1

def mix(x):
    x = x + 0x9E3779B97F4A7C15 & M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31

paths = sorted(glob.glob(sys.argv[2] + "/*.kv"))
assert len(paths) == int(sys.argv[1])
for path in paths:
    s = Snapshot(path)
    h = mix(struct.unpack("<Q", s.namespace[:8])[0])
    n = 0
    for position, id_, rows in s.chain():
        assert position == n and id_ == 1000 + n * n
        h = mix(h ^ id_)
        want = b"".join(struct.pack("<Q", mix(h + i & M)) for i in range(0, len(rows), 8))
        assert rows == want[:len(rows)], (path, position)
        n += 1
    assert n == s.n
END
    python "$work/check.py" "$@"
}

every_position_is_what_was_written() {
    check_positions 6 "$golden"
}

# 64 KiB a position: frames of 16, in a full file [0, 16) [16, 21), and in a delta [17, 30).
files_of_several_frames_are_read() {
    mkdir "$work/long"
    expect_exit 0 "$BUILD/tests/test_kv_golden" "$work/long" long
    check_positions 2 "$work/long"
    expect_exit 0 python3 "$reader" "$work/long/b3000000000000000000000000000000.kv"
    expect out '"first": 16,'
}

every_bent_file_is_refused() {
    cat >"$work/bend.py" <<'END'
import glob, os
from read_snapshot import Refused, Snapshot

def refused(bytes_):
    with open("bent.kv", "wb") as f:
        f.write(bytes_)
    try:
        Snapshot("bent.kv")
    except Refused as e:
        return bool(str(e))
    return False

for path in sorted(glob.glob(os.environ["GOLDEN"] + "/*.kv")):
    data = bytearray(open(path, "rb").read())
    for at in list(range(0, 256, 5)) + list(range(256, len(data), 331)) + list(range(len(data) - 4096, len(data) - 3900, 7)):
        data[at] ^= 1 << at % 8
        assert refused(data), (path, at)
        data[at] ^= 1 << at % 8
    for n in range(0, len(data), 1021):
        assert refused(data[:n]), (path, n)
    assert refused(data + bytes(4096))
END
    cd "$work" && python bend.py
}

the_command_says_what_it_found() {
    expect_exit 0 python3 "$reader" --chain "$golden/b1000000000000000000000000000001.kv"
    expect out '"precision": "f16"'
    expect out '"position": 29'
    head -c 20000 "$golden/b1000000000000000000000000000000.kv" >"$work/short.kv"
    expect_exit 1 python3 "$reader" "$work/short.kv"
    expect err '^short.kv: the file is 20000 bytes'
    cp "$golden/b1000000000000000000000000000001.kv" "$work/"
    expect_exit 1 python3 "$reader" --chain "$work/b1000000000000000000000000000001.kv"
    expect err 'parent b1000000000000000000000000000000 is not beside'
    expect_exit 2 python3 "$reader"
}

run_tests every_position_is_what_was_written files_of_several_frames_are_read every_bent_file_is_refused the_command_says_what_it_found
