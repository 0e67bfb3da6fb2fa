/* svg_chart.h - line charts as SVG, plain C99.  They follow the reader's light or dark mode.

       static svg_chart c;                             (large: not on the stack)
       c.title = "speed";  c.x_label = "tokens";  c.y_label = "TF";  c.log_x = 1;
       c.x_min = 1;  c.x_max = 4096;  c.y_max = 10;
       svg_tick(&c, 1, "1");  svg_tick(&c, 4096, "4K");
       svg_line *l = svg_new_line(&c, "ours", 0, 0);   0: the first colour; 0: a full line
       svg_point(l, 1, 5);  svg_point(l, 4096, 9);
       svg_chart_write(&c, "speed.svg");               1, or 0 when the file cannot be written

   Each line has its name at its right end.  Lines with an empty name have none.  A log axis needs
   positive limits. */
#ifndef SVG_CHART_H
#define SVG_CHART_H

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SVG_LINES = 16, SVG_POINTS = 64, SVG_TICKS = 16, SVG_COLOURS = 7 };

typedef struct svg_line {
    char name[64];
    int colour, dashed, n;
    double x[SVG_POINTS], y[SVG_POINTS];
} svg_line;

typedef struct svg_chart {
    const char *title, *note, *x_label, *y_label; /* note: a line below the title, or NULL */
    int log_x, log_y;
    double x_min, x_max, y_min, y_max;
    int lines, ticks;
    svg_line line[SVG_LINES];
    double tick[SVG_TICKS];
    char tick_text[SVG_TICKS][32]; /* of the x axis; the y axis chooses its own */
} svg_chart;

static void svg_tick(svg_chart *c, double x, const char *text)
{
    if (c->ticks == SVG_TICKS) return;
    c->tick[c->ticks] = x;
    snprintf(c->tick_text[c->ticks++], sizeof c->tick_text[0], "%s", text);
}

/* The last line again when there are too many. */
static svg_line *svg_new_line(svg_chart *c, const char *name, int colour, int dashed)
{
    svg_line *l = &c->line[c->lines < SVG_LINES ? c->lines++ : SVG_LINES - 1];
    snprintf(l->name, sizeof l->name, "%s", name);
    l->colour = colour % SVG_COLOURS;
    l->dashed = dashed;
    l->n = 0;
    return l;
}

static void svg_point(svg_line *l, double x, double y)
{
    if (l->n == SVG_POINTS) return;
    l->x[l->n] = x;
    l->y[l->n++] = y;
}

/* ---- the picture: 800 x 460, the plot between these ---- */
enum { SVG_WIDTH = 800, SVG_HEIGHT = 460 };
enum { SVG_LEFT = 70, SVG_RIGHT = 590, SVG_TOP = 84, SVG_BOTTOM = 404 };

static double svg_scale(int is_log, double v, double least, double most)
{
    return is_log ? log(v / least) / log(most / least) : (v - least) / (most - least);
}

static double svg_x(const svg_chart *c, double x)
{
    return SVG_LEFT + (SVG_RIGHT - SVG_LEFT) * svg_scale(c->log_x, x, c->x_min, c->x_max);
}

/* What lies outside is drawn at the edge. */
static double svg_y(const svg_chart *c, double y)
{
    const double s = svg_scale(c->log_y, y, c->y_min, c->y_max);
    return SVG_BOTTOM - (SVG_BOTTOM - SVG_TOP) * fmin(fmax(s, 0), 1);
}

static void svg_text(FILE *f, double x, double y, const char *class_name, const char *text)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, class_name);
    for (; *text; text++) {
        if (*text == '&') fputs("&amp;", f);
        else if (*text == '<') fputs("&lt;", f);
        else if (*text == '>') fputs("&gt;", f);
        else fputc(*text, f);
    }
    fputs("</text>\n", f);
}

static void svg_head(FILE *f)
{
    static const char *const light[SVG_COLOURS] = {"#0067a5", "#c44e00", "#00795a",
                                                   "#8a3fa0", "#7a6a00", "#555555",
                                                   "#b3205f"};
    static const char *const dark[SVG_COLOURS] = {"#6bb8f0", "#ff9a4d", "#4fd1a5",
                                                  "#d79bea", "#e0cf5a", "#b0b0b0",
                                                  "#ff7bab"};
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" role=\"img\">\n<style>\n",
            SVG_WIDTH, SVG_HEIGHT, SVG_WIDTH, SVG_HEIGHT);
    fputs("text{font:13px system-ui,sans-serif;fill:#1f2328}\n"
          ".title{font-size:16px;font-weight:600}\n.note,.x,.y{fill:#57606a}\n"
          ".x,.xl{text-anchor:middle}\n.y{text-anchor:end}\n"
          ".back{fill:#ffffff}\n.grid{stroke:#d8dee4;fill:none}\n"
          "polyline{fill:none;stroke-width:2}\n.dash{stroke-dasharray:6 4;stroke-width:1.5}\n", f);
    for (int i = 0; i < SVG_COLOURS; i++)
        fprintf(f, ".s%d{stroke:%s}.p%d,.n%d{fill:%s}\n", i, light[i], i, i, light[i]);
    fputs("@media(prefers-color-scheme:dark){\ntext{fill:#e6edf3}.note,.x,.y{fill:#9198a1}\n"
          ".back{fill:#0d1117}.grid{stroke:#30363d}\n", f);
    for (int i = 0; i < SVG_COLOURS; i++)
        fprintf(f, ".s%d{stroke:%s}.p%d,.n%d{fill:%s}\n", i, dark[i], i, i, dark[i]);
    fputs("}\n</style>\n", f);
}

/* The y axis: powers of ten, or steps of 1, 2 or 5 times one. */
static void svg_grid(FILE *f, const svg_chart *c)
{
    const double span = c->y_max - c->y_min, power = pow(10, floor(log10(span / 4)));
    const double step = power * (span / 4 / power >= 5 ? 5 : span / 4 / power >= 2 ? 2 : 1);
    double y = c->log_y ? pow(10, ceil(log10(c->y_min) - 1e-9)) : ceil(c->y_min / step) * step;
    for (int i = 0; i < 64 && y <= c->y_max * (1 + 1e-9); i++, y = c->log_y ? 10 * y : y + step) {
        char text[32];
        snprintf(text, sizeof text, "%g", c->log_y ? pow(10, floor(log10(y) + 0.5)) : y);
        fprintf(f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n", SVG_LEFT, svg_y(c, y), SVG_RIGHT);
        svg_text(f, SVG_LEFT - 8, svg_y(c, y) + 4, "y", text);
    }
    for (int i = 0; i < c->ticks; i++) {
        const double x = svg_x(c, c->tick[i]);
        int room = 1; /* beside the texts of the ticks before */
        for (int k = 0; k < i; k++) room = room && fabs(svg_x(c, c->tick[k]) - x) >= 30;
        fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>\n", x, SVG_TOP, SVG_BOTTOM + 5);
        if (room) svg_text(f, x, SVG_BOTTOM + 20, "x", c->tick_text[i]);
    }
}

/* Where the names go: at the height of the last points, but 16 apart. */
static void svg_place_names(const svg_chart *c, double *at)
{
    int order[SVG_LINES], n = 0;
    for (int i = 0; i < c->lines; i++) {
        const svg_line *l = &c->line[i];
        int k = n;
        if (l->name[0] == 0 || l->n == 0) continue;
        at[i] = svg_y(c, l->y[l->n - 1]) + 4;
        for (; k > 0 && at[order[k - 1]] > at[i]; k--) order[k] = order[k - 1];
        order[k] = i;
        n++;
    }
    for (int k = 1; k < n; k++) at[order[k]] = fmax(at[order[k]], at[order[k - 1]] + 16);
    for (int k = n - 1; k >= 0; k--) { /* back up where they ran out of the picture */
        const double most = k == n - 1 ? SVG_BOTTOM + 8 : at[order[k + 1]] - 16;
        at[order[k]] = fmin(at[order[k]], most);
    }
}

static int svg_chart_write(const svg_chart *c, const char *file)
{
    double name_y[SVG_LINES] = {0};
    FILE *f = fopen(file, "w");
    if (f == NULL) return 0;
    svg_head(f);
    fprintf(f, "<rect class=\"back\" width=\"%d\" height=\"%d\"/>\n", SVG_WIDTH, SVG_HEIGHT);
    svg_text(f, 16, 26, "title", c->title);
    if (c->note) svg_text(f, 16, 46, "note", c->note);
    svg_grid(f, c);
    svg_text(f, (SVG_LEFT + SVG_RIGHT) / 2, SVG_HEIGHT - 14, "xl", c->x_label);
    svg_text(f, 16, SVG_TOP - 14, "yl", c->y_label);
    svg_place_names(c, name_y);
    for (int i = 0; i < c->lines; i++) {
        const svg_line *l = &c->line[i];
        if (l->n == 0) continue;
        fprintf(f, "<polyline class=\"s%d%s\" points=\"", l->colour, l->dashed ? " dash" : "");
        for (int k = 0; k < l->n; k++)
            fprintf(f, "%s%.1f,%.1f", k ? " " : "", svg_x(c, l->x[k]), svg_y(c, l->y[k]));
        fputs("\"/>\n", f);
        for (int k = 0; k < l->n && !l->dashed; k++)
            fprintf(f, "<circle class=\"p%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"/>\n", l->colour,
                    svg_x(c, l->x[k]), svg_y(c, l->y[k]));
        if (l->name[0] != 0) {
            char class_name[8];
            snprintf(class_name, sizeof class_name, "n%d", l->colour);
            svg_text(f, SVG_RIGHT + 12, name_y[i], class_name, l->name);
        }
    }
    fputs("</svg>\n", f);
    return fclose(f) == 0;
}

#endif /* SVG_CHART_H */
