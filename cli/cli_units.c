/* Numbers as people read them, and the bar that moves while they wait. */
#include "cli/cli.h"

#include <inttypes.h>
#include <unistd.h>

enum { BAR_WIDTH = 24 };

const char *cli_bytes(char *buf, size_t n, double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;

    for (; bytes >= 1024 && unit < 4; unit++)
        bytes /= 1024;
    snprintf(buf, n, unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return buf;
}

const char *cli_rate(char *buf, size_t n, uint64_t bytes, uint64_t ns)
{
    char amount[24];

    if (ns == 0)
        ns = 1;
    snprintf(buf, n, "%s/s", cli_bytes(amount, sizeof(amount), (double)bytes * 1e9 / (double)ns));
    return buf;
}

const char *cli_span(char *buf, size_t n, uint64_t ns)
{
    const double s = (double)ns / 1e9;

    if (s < 1)
        snprintf(buf, n, "%.1f ms", s * 1e3);
    else if (s < 120)
        snprintf(buf, n, "%.1f s", s);
    else if (s < 2 * 3600)
        snprintf(buf, n, "%.0f min", s / 60);
    else if (s < 2 * 86400)
        snprintf(buf, n, "%.0f h", s / 3600);
    else
        snprintf(buf, n, "%.0f days", s / 86400);
    return buf;
}

void cli_bar_begin(struct cli_bar *bar, const char *what)
{
    *bar = (struct cli_bar){
        .what = what, .start_ns = node_now_ns(), .terminal = isatty(STDERR_FILENO) == 1};
}

void cli_bar_move(struct cli_bar *bar, uint64_t done, uint64_t total)
{
    char line[BAR_WIDTH + 1], moved[32], all[32], rate[32];
    const uint64_t ns = (uint64_t)(node_now_ns() - bar->start_ns);
    size_t filled;

    if (!bar->terminal || total == 0)
        return;
    if (done > total)
        done = total;
    filled = (size_t)((double)done / (double)total * BAR_WIDTH);
    for (size_t i = 0; i < BAR_WIDTH; i++)
        line[i] = i < filled ? '#' : '.';
    line[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r\x1b[K%s [%s] %3.0f %%, %s of %s, %s", bar->what, line,
            (double)done / (double)total * 100, cli_bytes(moved, sizeof(moved), (double)done),
            cli_bytes(all, sizeof(all), (double)total), cli_rate(rate, sizeof(rate), done, ns));
    fflush(stderr);
    bar->drawn = true;
}

void cli_bar_end(struct cli_bar *bar)
{
    if (!bar->drawn)
        return;
    fputs("\r\x1b[K", stderr);
    fflush(stderr);
    bar->drawn = false;
}
