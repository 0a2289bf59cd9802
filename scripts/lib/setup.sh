# Shared by quickstart, check and cluster: what a machine needs, and how it is told. Sourced, never run.
#
# Every step is idempotent: it looks first, and says in one line what it did and how long it took.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
log_dir=$top/.run/log
mkdir -p "$log_dir"

packages_build=(gcc meson ninja-build pkg-config python3 git
    libevent-dev libjansson-dev libxxhash-dev libssl-dev
    libgrpc-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libucx-dev
    libcmocka-dev) # the tests are configured with the rest, also where only the programs are built
packages_check=(clang clang-format libclang-rt-14-dev libboost-context-dev scdoc ucx-utils
    prometheus python3-venv iproute2 curl openssl procps)

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' plain=$'\e[0m'; else bold='' dim='' red='' plain=''; fi

say() { printf '%s\n' "$*"; }
die() { printf '%serror:%s %s\n' "$red" "$plain" "$*" >&2; exit 1; }

# step NAME COMMAND...: runs it with its output in a log, shows progress, and the log's end if it fails. Without a
# terminal progress is a line every so many seconds.
progress_s=${BATON_PROGRESS_S:-15}
step() {
    local name=$1 start=$SECONDS log pid status=0 shown=0
    shift
    log=$log_dir/$(printf '%s' "$name" | tr -c 'A-Za-z0-9\n' '-').log
    printf '%s%-34s%s' "$bold" "$name" "$plain"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    if [ -t 1 ]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r%s%-34s%s %s%4ds  %-60.60s%s' "$bold" "$name" "$plain" "$dim" $((SECONDS - start)) \
                "$(tail -c 200 "$log" | tr -d '\r' | tail -n 1)" "$plain"
            sleep 0.5
        done
        printf '\r%*s\r%s%-34s%s' 110 '' "$bold" "$name" "$plain"
    else
        while kill -0 "$pid" 2>/dev/null; do
            if [ $((SECONDS - start - shown)) -ge "$progress_s" ]; then
                shown=$((SECONDS - start))
                printf '\n    %4ds  %.90s' $shown "$(tail -c 300 "$log" | tr -d '\r' | tail -n 1)"
            fi
            sleep 0.2
        done
        [ $shown -eq 0 ] || printf '\n%-34s' "$name"
    fi
    wait "$pid" || status=$?
    if [ $status -ne 0 ]; then
        printf ' %sfailed%s after %ds\n' "$red" "$plain" $((SECONDS - start))
        tail -n 60 "$log" | sed 's/^/    /'
        say "    (all of it: $log)"
        return $status
    fi
    printf ' ok  %4ds\n' $((SECONDS - start))
}

missing_packages() {
    local p
    for p in "$@"; do
        dpkg-query -W -f='${db:Status-Abbrev}' "$p" 2>/dev/null | grep -q '^ii' || printf '%s\n' "$p"
    done
}

install_packages() {
    local wanted root=()
    mapfile -t wanted < <(missing_packages "$@")
    [ ${#wanted[@]} -eq 0 ] && return 0
    command -v apt-get >/dev/null || { echo "install these by hand (no apt-get here): ${wanted[*]}"; return 1; }
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "run as root, or install: apt-get install ${wanted[*]}"; return 1; }
        root=(sudo)
    fi
    echo "installing: ${wanted[*]}"
    "${root[@]}" apt-get update &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${wanted[@]}"
}

programs=(router/baton-router prefill/baton-prefill decode/baton-decode eval/baton-eval)

# build DIR "TARGETS" MESON-OPTIONS...: configures once, then builds the targets, or all.
build() {
    local dir=$1 targets=$2
    shift 2
    if [ ! -f "$dir/build.ninja" ]; then
        meson setup "$dir" "$top" "$@" || return 1
    fi
    # shellcheck disable=SC2086  # targets are words
    ninja -C "$dir" $targets
}

# The best bundled model there is.
bundled_model() {
    if [ -f "$top/models/baton-tiny/config.json" ]; then
        printf '%s\n' "$top/models/baton-tiny"
    else
        [ -f "$top/.run/toy/config.json" ] || "$top/scripts/make-toy" --out "$top/.run/toy" >&2 || return 1
        printf '%s\n' "$top/.run/toy"
    fi
}
