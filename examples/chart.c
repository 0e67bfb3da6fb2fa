/* chart.c - draws what bench and accuracy have measured: a CSV file to an SVG chart.

       cc -O2 -std=c99 examples/chart.c -o chart -lm
       ./chart speed examples/charts/speed.csv speed.svg
       ./chart error examples/charts/accuracy.csv error.svg [distribution]

   speed: the rows of the headline preset in the default mode, one line for each number of heads,
   and dashed, where the file has both, the ceiling that binds it, measured in the same run.
   error: relative rms against length on log axes, decode in one split and in both modes beside one
   FP8 accumulator, for one distribution (default: mean).

   Expected output: none.  Exit code: 0, or 1 with a message. */
#include "svg_chart.h"

#include <stdarg.h>
#include <stdlib.h>

enum { COLUMNS = 64, CELL = 64, ROWS = 8192 };

typedef struct csv {
    char note[512]; /* the first comment */
    int columns, rows;
    char name[COLUMNS][CELL];
    char (*cell)[COLUMNS][CELL]; /* [ROWS] */
} csv;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "chart: %s: %s\n", what, why);
    exit(1);
}

static int split(const char *line, char (*to)[CELL])
{
    int n = 0;
    for (const char *c = line; c != NULL && n < COLUMNS; n++) {
        const size_t length = strcspn(c, ",");
        snprintf(to[n], CELL, "%.*s", (int)length, c);
        c = c[length] == ',' ? c + length + 1 : NULL;
    }
    return n;
}

static csv read_csv(const char *file)
{
    static char line[4096];
    csv t;
    FILE *f = fopen(file, "r");
    memset(&t, 0, sizeof t);
    if (f == NULL) fail(file, "cannot be read");
    t.cell = (char (*)[COLUMNS][CELL])calloc(ROWS, sizeof *t.cell);
    if (t.cell == NULL) fail(file, "out of memory");
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\r\n")] = 0;
        if (line[0] == '#' && t.note[0] == 0) snprintf(t.note, sizeof t.note, "%.500s", line + 2);
        if (line[0] == '#' || line[0] == 0) continue;
        if (t.columns == 0) {
            t.columns = split(line, t.name);
            continue;
        }
        if (t.rows == ROWS) fail(file, "too many rows");
        if (split(line, t.cell[t.rows++]) != t.columns) fail(line, "not as many cells as names");
    }
    fclose(f);
    if (t.rows == 0) fail(file, "no rows");
    return t;
}

static const char *text_of(const csv *t, int row, const char *name)
{
    for (int i = 0; i < t->columns; i++)
        if (strcmp(t->name[i], name) == 0) return t->cell[row][i];
    fail(name, "no such column");
    return NULL;
}

static double number_of(const csv *t, int row, const char *name)
{
    return atof(text_of(t, row, name));
}

static void length_text(char *text, size_t size, double tokens)
{
    if (tokens >= 1048576) snprintf(text, size, "%gM", tokens / 1048576);
    else if (tokens >= 1024) snprintf(text, size, "%gK", tokens / 1024);
    else snprintf(text, size, "%g", tokens);
}

/* Gives a line's point for this x, and the axis its tick. */
static void add_point(svg_chart *c, svg_line *l, double x, double y)
{
    char text[32];
    int known = 0;
    for (int i = 0; i < c->ticks; i++) known |= c->tick[i] == x;
    length_text(text, sizeof text, x);
    if (!known) svg_tick(c, x, text);
    c->x_min = c->x_min == 0 ? x : fmin(c->x_min, x);
    c->x_max = fmax(c->x_max, x);
    svg_point(l, x, y);
}

/* TF that the ceiling of a row allows; 0 where the tensor cores' is not known. */
static double ceiling_tf(const csv *t, int row)
{
    if (text_of(t, row, "fp8_tflops")[0] == 0) return 0;
    return number_of(t, row, "tflops") / number_of(t, row, "ceiling_share");
}

static void draw_speed(svg_chart *c, const csv *t)
{
    static const int heads[] = {128, 64, 32, 16};
    c->title = "Decode, 0.5M to 1M cached tokens in all";
    c->x_label = "tokens of each request";
    c->y_label = "TF";
    c->log_x = 1;
    for (int i = 0; i < 4; i++) {
        char name[64];
        svg_line *speed, *ceiling;
        snprintf(name, sizeof name, "%d heads", heads[i]);
        speed = svg_new_line(c, name, i, 0);
        snprintf(name, sizeof name, "ceiling of %d", heads[i]);
        ceiling = svg_new_line(c, name, i, 1);
        for (int row = 0; row < t->rows; row++) {
            const double kv = number_of(t, row, "kv"), tf = number_of(t, row, "tflops");
            if (strcmp(text_of(t, row, "preset"), "headline") != 0) continue;
            if (strcmp(text_of(t, row, "mode"), "default") != 0) continue;
            if (number_of(t, row, "heads") != heads[i] || number_of(t, row, "page") != 64) continue;
            add_point(c, speed, kv, tf);
            if (ceiling_tf(t, row) > 0) add_point(c, ceiling, kv, ceiling_tf(t, row));
            c->y_max = fmax(c->y_max, 1.05 * fmax(tf, ceiling_tf(t, row)));
        }
    }
}

static void draw_error(svg_chart *c, const csv *t, const char *distribution)
{
    static const struct {
        const char *against, *what, *name;
        int splits, colour, dashed;
    } line[] = {
        {"quantised", "one accumulator", "one FP8 accumulator, 1 split", 1, 1, 0},
        {"quantised", "one accumulator", "one FP8 acc., 16 splits", 16, 3, 0},
        {"quantised", "general", "general path, 1 split", 1, 2, 0},
        {"quantised", "sm90", "snapmla, 1 split", 1, 0, 0},
        {"quantised", "emulated", "snapmla, 1 split, emulated", 1, 0, 0},
        {"bf16 q", "precise sm90", "precise mode, 1 split", 1, 6, 0},
        {"bf16 q", "precise emulated", "precise, 1 split, emulated", 1, 6, 0},
        {"bf16", "both", "scale a tensor, RoPE FP8 *", 1, 4, 1},
        {"bf16", "format", "the cache format *", 1, 5, 1},
    };
    static char title[128];
    int before = 0; /* lines before the last one; an emulation stands in for the one above it */
    snprintf(title, sizeof title, "Relative error of the output, \"%s\" rows (* against BF16)",
             distribution);
    c->title = title;
    c->x_label = "tokens of the request";
    c->y_label = "relative rms";
    c->log_x = c->log_y = 1;
    c->y_min = 1e-3;
    c->y_max = 1;
    for (size_t i = 0; i < sizeof line / sizeof line[0]; i++) {
        svg_line *l = NULL;
        if (strstr(line[i].what, "emulated") != NULL && c->lines > before) continue;
        before = c->lines;
        for (int row = 0; row < t->rows; row++) {
            if (strcmp(text_of(t, row, "against"), line[i].against) != 0) continue;
            if (strcmp(text_of(t, row, "what"), line[i].what) != 0) continue;
            if (strcmp(text_of(t, row, "distribution"), distribution) != 0) continue;
            if (number_of(t, row, "splits") != line[i].splits) continue;
            if (l == NULL) l = svg_new_line(c, line[i].name, line[i].colour, line[i].dashed);
            add_point(c, l, number_of(t, row, "tokens"), number_of(t, row, "rms"));
        }
    }
}

int main(int argc, char **argv)
{
    static svg_chart c;
    csv t;
    int drawn = 0;
    if (argc < 4) fail("arguments", "speed or error, a CSV file, an SVG file");
    t = read_csv(argv[2]);
    if (strcmp(argv[1], "speed") == 0) draw_speed(&c, &t);
    else if (strcmp(argv[1], "error") == 0) draw_error(&c, &t, argc > 4 ? argv[4] : "mean");
    else fail(argv[1], "neither speed nor error");
    c.note = t.note;
    if (strlen(t.note) > 118) strcpy(t.note + 115, "...");
    for (int i = 0; i < c.lines; i++) drawn += c.line[i].n > 1;
    if (drawn == 0 || !(c.x_max > c.x_min)) fail(argv[2], "no line to draw");
    if (!svg_chart_write(&c, argv[3])) fail(argv[3], "cannot be written");
    free(t.cell);
    return 0;
}
