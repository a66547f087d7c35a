#!/usr/bin/env bash
# `baton` without a node: command lines, model files, tokenizing, and the errors of each.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tiny=$BUILD/tests/tiny/tiny-q4_1.gguf

every_command_has_help_and_a_version() {
    for command in "" generate status audit close snapshot tokenize model; do
        # shellcheck disable=SC2086
        expect_exit 0 "$baton" $command --help
        expect out "^usage: baton ${command:-COMMAND}"
        expect out '^ *-h, --help '
        # shellcheck disable=SC2086
        expect_exit 0 "$baton" $command --version
        expect out '^baton [0-9]+\.[0-9]+\.[0-9]+$'
        # shellcheck disable=SC2086
        expect_exit 0 "$baton" help $command
        expect out "^usage: baton ${command:-COMMAND}"
    done
}

# expect_usage PATTERN ARGUMENT...
expect_usage() {
    local pattern=$1
    shift
    expect_exit 2 "$baton" "$@"
    [ ! -s "$work/out" ] || fail "$* printed to stdout"
    [ "$(wc -l <"$work/err")" -eq 1 ] || fail "$* said more than a line"
    expect err "^baton: $pattern"
}

a_wrong_command_line_is_named_in_one_line_and_exits_2() {
    expect_usage 'which command'
    expect_usage 'frobnicate: no such command' frobnicate
    expect_usage 'generate: --to HOST:PORT is needed' generate hello
    expect_usage '--to "here": must be HOST:PORT' generate --to here hello
    expect_usage 'generate: which text' generate --to h:1
    expect_usage 'generate: one TEXT at most' generate --to h:1 two words
    expect_usage '--max-tokens "0": must be a whole number from 1' generate --to h:1 --max-tokens 0 x
    expect_usage '--max-tokens "-1"' generate --to h:1 --max-tokens=-1 x
    expect_usage '--temperature "hot"' generate --to h:1 --temperature hot x
    expect_usage '--route "north": must be one of auto, local, prefill' generate --to h:1 --route north x
    expect_usage 'generate: --ids and --chat' generate --to h:1 --ids --chat 1,2
    expect_usage 'generate: --logits-digest needs --json' generate --to h:1 --logits-digest x
    expect_usage '"1x" is not a token id' generate --to h:1 --ids 0,1x,2
    expect_usage 'status: --to HOST:PORT is needed' status
    expect_usage 'status: takes no argument' status --to h:1 x
    expect_usage 'audit: --to HOST:PORT is needed' audit
    expect_usage 'audit: takes no argument' audit --to h:1 x
    expect_usage 'tokenize: --model FILE is needed' tokenize x
    expect_usage 'model: which file' model
    expect_usage 'model: one FILE at most' model a b
    expect_usage 'help: no such command' help frobnicate
    expect_usage 'close: --to HOST:PORT is needed' close x
    expect_usage 'close: which session' close --to h:1
    expect_usage 'generate: --stop "": must not be empty' generate --to h:1 --stop '' x
    expect_usage 'generate: TEXT is empty' generate --to h:1 --chat ''
    expect_usage '--timeout "0": must be a number from 0\.001' generate --to h:1 --timeout 0 x
    expect_usage '"" is not a token id, at offset 2 ' generate --to h:1 --ids 1,,2
    expect_usage '"" is not a token id, at offset 2 ' generate --to h:1 --ids 1,
}

text_that_looks_like_an_option_is_named() {
    expect_usage '"-1 is what\?": no such option .* stands behind "--"' generate --to h:1 -c -n 10 '-1 is what?'
    expect_usage '"--what is this\?": no such option' generate --to h:1 '--what is this?'
    expect_usage '"-cx": no such option' generate --to h:1 -cx text
    # Behind "--" and as a value it is text.
    expect_exit 3 "$baton" generate --to 127.0.0.1:1 --system '-1 is' --stop -x -n1 -- '-1 is what?'
}

a_closed_stdin_is_named() {
    "$baton" generate --to 127.0.0.1:1 - <&- >"$work/out" 2>"$work/err"
    [ $? -eq 1 ] || fail "exit code"
    expect err '^baton: stdin: cannot be read from: it is closed$'
}

sampling_options_without_a_temperature_are_noted() {
    expect_exit 3 "$baton" generate --to 127.0.0.1:1 --seed 7 hello
    expect err '^baton: note: --seed has no effect without --temperature$'
    expect_exit 3 "$baton" generate --to 127.0.0.1:1 --seed 7 --temperature 1 hello
    expect_not err 'no effect'
}

a_node_that_is_not_there_exits_3() {
    # Port 1 of loopback is nobody's.
    expect_exit 3 "$baton" generate --to 127.0.0.1:1 hello
    expect err '^baton: UNAVAILABLE: '
    expect_exit 3 "$baton" close --to 127.0.0.1:1 mine
    expect err '^baton: UNAVAILABLE: '
    expect_exit 3 "$baton" status --to 127.0.0.1:1
    expect err '^baton: UNAVAILABLE: '
    expect_exit 3 "$baton" audit --to 127.0.0.1:1
    expect err '^baton: UNAVAILABLE: '
    expect_exit 3 "$baton" generate --json --to 127.0.0.1:1 hello
    expect out '^\{"event":"error","code":"UNAVAILABLE","message":".+"\}$'
}

a_model_file_is_listed() {
    expect_exit 0 "$baton" model "$tiny"
    expect out '^  general\.architecture +"llama"$'
    expect out '^  layers +[0-9]+$'
    expect out '^  Q4_1 +[0-9]+ tensors '
    expect_not out 'token_embd\.weight'
    expect_exit 0 "$baton" model --tensors "$tiny"
    expect out '^  token_embd\.weight +[A-Z0-9_]+ +\[[0-9]+, [0-9]+\] [0-9]+ bytes$'
}

a_file_that_is_no_model_is_an_error_with_its_name() {
    expect_exit 1 "$baton" model /nonexistent.gguf
    expect err '^baton: /nonexistent\.gguf: No such file or directory$'
    printf 'not a model' >"$work/bad.gguf"
    expect_exit 1 "$baton" model "$work/bad.gguf"
    expect err '^baton: .*/bad\.gguf: '
    head -c 5000 "$tiny" >"$work/cut.gguf"
    expect_exit 1 "$baton" model "$work/cut.gguf"
    expect_exit 1 "$baton" tokenize --model "$work/cut.gguf" x
    expect err '^baton: .*/cut\.gguf: '
}

tokens_come_back_as_the_text_they_were() {
    local text='Hello, world: 3.14 {x}' ids
    ids=$("$baton" tokenize --model "$tiny" --ids -- "$text") || fail "tokenize"
    [[ $ids =~ ^[0-9]+(,[0-9]+)*$ ]] || fail "ids: $ids"
    expect_exit 0 "$baton" tokenize --model "$tiny" --decode "$ids"
    [ "$(cat "$work/out")" = "$text" ] || fail "$(cat "$work/out") is not $text"
    printf '%s' "$text" | "$baton" tokenize --model "$tiny" --ids - >"$work/out" || fail "tokenize -"
    [ "$(cat "$work/out")" = "$ids" ] || fail "stdin gives other tokens"
    printf '%s\n' "$text" | "$baton" tokenize --model "$tiny" --ids - >"$work/out" || fail "tokenize - with a newline"
    [ "$(cat "$work/out")" = "$ids" ] || fail "stdin gives other tokens"
    expect_exit 0 "$baton" tokenize --model "$tiny" -- "$text"
    [ "$(awk '{print $1}' "$work/out" | paste -sd,)" = "$ids" ] || fail "the list has other tokens"
}

text_that_is_not_utf8_is_refused_with_its_offset() {
    expect_exit 1 "$baton" tokenize --model "$tiny" $'ab\xff'
    expect err '^baton: text: .*\b2\b'
}

an_id_past_the_vocabulary_is_refused() {
    expect_exit 1 "$baton" tokenize --model "$tiny" --decode 1,99999999
    expect err '^baton: token id 99999999: '
}

control_tokens_that_are_left_out_are_noted() {
    expect_exit 0 "$baton" tokenize --model "$tiny" --decode 0
    [ ! -s "$work/out" ] || fail "printed: $(cat "$work/out")"
    expect err '^baton: note: 1 control token left out; --special prints them$'
    expect_exit 0 "$baton" tokenize --model "$tiny" --decode --special 0
    [[ -s $work/out && ! -s $work/err ]] || fail "not printed, or noted"
}

a_full_disk_is_an_error() {
    local arguments
    [ -c /dev/full ] || fail "/dev/full is no device on this machine"
    for arguments in "model $tiny" --help 'generate --help' --version "tokenize --model $tiny hello"; do
        # shellcheck disable=SC2086
        "$baton" $arguments >/dev/full 2>"$work/err"
        [ $? -eq 1 ] || fail "$arguments: exit code"
        [ "$(cat "$work/err")" = 'baton: stdout: cannot be written to' ] || fail "$arguments: $(cat "$work/err")"
    done
}

run_tests every_command_has_help_and_a_version \
    a_wrong_command_line_is_named_in_one_line_and_exits_2 \
    text_that_looks_like_an_option_is_named \
    a_closed_stdin_is_named \
    sampling_options_without_a_temperature_are_noted \
    a_node_that_is_not_there_exits_3 \
    a_model_file_is_listed \
    a_file_that_is_no_model_is_an_error_with_its_name \
    tokens_come_back_as_the_text_they_were \
    text_that_is_not_utf8_is_refused_with_its_offset \
    an_id_past_the_vocabulary_is_refused \
    control_tokens_that_are_left_out_are_noted \
    a_full_disk_is_an_error
