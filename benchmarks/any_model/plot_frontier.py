"""Draws what any_model_benchmark prints: plot_frontier.py < OUTPUT > frontier.svg.

Time of a step against activation memory, both relative to the whole module run by LibTorch."""
import re
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 30, 170, 50
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read(lines):
    """Name -> [(share of memory, share of time)] in order of memory."""
    curves, name, plain = {}, None, None
    for line in lines:
        if line and not line.startswith(" "):
            name, plain = line.strip(), None
            continue
        found = re.match(r"\s+(.+?)\s+([\d.]+) s\s+\S+%.*?\s+peak\s+([\d.]+) (\S+)", line)
        if not found:
            continue
        point = float(found[3]) * UNITS[found[4]], float(found[2])
        if plain is None:
            plain = point
            curves[name] = []
        else:
            curves[name].append((100 * point[0] / plain[0], 100 * point[1] / plain[1]))
    return {each: shown(points) for each, points in curves.items()}


def shown(points):
    """By memory: of equal plans the faster run, and none that takes twice as long as the whole module."""
    fastest = {}
    for share, time in points:
        fastest[share] = min(time, fastest.get(share, time))
    return sorted(point for point in fastest.items() if point[1] <= 200)


def main():
    curves = read(sys.stdin.read().splitlines())
    top = max(max(y for _, y in points) for points in curves.values())
    top = max(150, 10 * (int(top) // 10 + 1))
    def x(share): return LEFT + (WIDTH - LEFT - RIGHT) * share / 110
    def y(share): return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (share - 90) / (top - 90)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for share in range(0, 111, 10):
        out.append(f'<line x1="{x(share)}" y1="{y(90)}" x2="{x(share)}" y2="{y(top)}" stroke="#eee"/>')
        out.append(f'<text x="{x(share)}" y="{y(90) + 16}" text-anchor="middle">{share}%</text>')
    for share in range(90, top + 1, 10):
        out.append(f'<line x1="{x(0)}" y1="{y(share)}" x2="{x(110)}" y2="{y(share)}" '
                   f'stroke="{"#999" if share == 100 else "#eee"}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(share) + 4}" text-anchor="end">{share}%</text>')
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
        out.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * i + 10}" fill="{colour}">{name}</text>')
    out.append(f'<text x="{x(55)}" y="{HEIGHT - 12}" text-anchor="middle">peak of activations, of the whole module\'s</text>')
    out.append(f'<text transform="translate(16,{y((90 + top) / 2)}) rotate(-90)" text-anchor="middle">'
               "time of a step, of the whole module's</text>")
    print("\n".join(out + ["</svg>"]))


main()
