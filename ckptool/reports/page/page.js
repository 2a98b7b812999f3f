// The program of a page: the treemap of bytes, the table of all tensors, and the details of one.
// It reads the columns in #data (columns.py says what they are), asks for nothing, and puts names into text alone.
"use strict";
(async () => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST = 1500; // rectangles of the treemap
  const DEEPEST = 64; // segments of a name that are looked at
  const ROW = 32; // pixels of a row of the table, as in page.css
  const LISTED = 40; // lines of a list beside a picture
  const CHANGED = "*"; // the filter that a comparison begins with

  // -- text

  const HIDDEN = /[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]|\p{Cs}/gu;
  const hex = (code, digits) => code.toString(16).padStart(digits, "0");
  const escaped = (char) => ((code) => (code < 256 ? "\\x" + hex(code, 2) : "\\u" + hex(code, 4)))(char.charCodeAt(0));
  const visible = (text) => text.replace(HIDDEN, escaped);
  const label = (name) => visible(name) || '""';
  const middle = (text, most) =>
    text.length <= most ? text : text.slice(0, Math.ceil((most - 1) / 2)) + "…" + text.slice(-Math.floor((most - 1) / 2));
  const count = (value) => value.toLocaleString("en-US");
  const plural = (value, noun) => count(value) + " " + noun + (value === 1 ? "" : "s");
  const percent = (part, whole) => (whole ? ((100 * part) / whole).toPrecision(3) + " %" : "");

  function size(bytes) {
    if (bytes < 1000) return plural(bytes, "byte");
    let value = bytes / 1000, unit = 0;
    while (value >= 999.5 && unit < 5) [value, unit] = [value / 1000, unit + 1];
    return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + " " + ["kB", "MB", "GB", "TB", "PB", "EB"][unit];
  }

  function number(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "string") return value;
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return count(value);
    return Math.abs(value) < 1e-4 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
  }

  // -- elements

  function element(name, attributes = {}, ...inside) {
    const made = document.createElement(name);
    return filled(made, attributes, inside);
  }

  function drawn(name, attributes = {}, ...inside) {
    return filled(document.createElementNS(SVG, name), attributes, inside);
  }

  function filled(made, attributes, inside) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...inside);
    return made;
  }

  /** A number in short, with all of it for programs; a cosine near 1 by its distance from 1. */
  const exact = (value, by) => element("data", { value: value === null || value === undefined ? "" : value }, by === "cosine" ? cosine(value) : number(value));
  const cosine = (value) => (1 - value > 1e-12 && 1 - value < 5e-5 ? `1 - ${Number((1 - value).toPrecision(2))}` : number(value));
  const within = (id) => document.getElementById(id);

  function table(title, headings, rows, right = 1) {
    const cell = (inside, place) =>
      place ? element("td", { class: place >= right ? "n" : null }, inside) : element("th", { scope: "row" }, inside);
    return element("div", { class: "frame", tabindex: 0, role: "group", "aria-label": title },
      element("table", {},
        element("caption", { class: "unseen" }, title),
        element("thead", {}, element("tr", {}, ...headings.map((text, place) =>
          element("th", { scope: "col", class: place >= right ? "n" : null }, text)))),
        element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))))));
  }

  function copier(text) {
    const button = element("button", { type: "button", class: "copy", onclick: copy }, "Copy");
    async function copy() {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Not allowed";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    }
    return button;
  }

  // -- data

  async function unpacked() {
    const text = atob(within("data").textContent), bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place); // 20 times faster than from()
    within("data").remove();
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  const data = await unpacked();
  const { stats, other, diff } = data;
  const total = data.bytes.length;
  function segments(row) {
    const dict = data.dict[row], name = data.name[row], owner = data.owner[row];
    if (owner !== null) return ["optimizer state", ...segments(owner), name.slice(name.lastIndexOf(".") + 1)];
    const parts = dict === null
      ? (name.match(/\["(?:[^"\\]|\\.)*"\]|\[[^\]]*\]|[^.[\]]+/g) || [name]).map((part) => part.replace(/^\["(.*)"\]$/s, "$1"))
      : (dict ? [dict] : []).concat(name.split("."));
    return parts.length > DEEPEST ? parts.slice(0, DEEPEST - 1).concat(parts.slice(DEEPEST - 1).join(".")) : parts;
  }

  const fate = (row) => (diff ? diff.fate[row] : "");
  const nonfinite = (row) => (stats ? stats.nans[row] + stats.infs[row] + (other ? other.nans[row] + other.infs[row] : 0) : 0);

  function suspicions(row) {
    if (!stats) return [];
    const found = new Set();
    for (const side of other ? [stats, other] : [stats]) {
      if (side.nans[row]) found.add("NaN");
      if (side.infs[row]) found.add("Inf");
      if (side.finite[row] && side.min[row] === 0 && side.max[row] === 0) found.add("all zero");
      if (side.reason[row]) found.add("no numbers");
    }
    return [...found];
  }

  /** The figure of a tensor that is in both: 0 or 1 where it is the same in both, null where it is not known. */
  function figure(by, row) {
    if (fate(row) === "same") return by === "cosine" ? 1 : 0;
    return diff[by][row];
  }

  // -- the tree of modules

  const nodes = []; // by number, parents first
  const leaves = []; // rows in the order of the tree: those of a node are from node.begin to node.end

  function grown() {
    const root = { name: "", row: -1, modules: new Map(), leaves: [] };
    for (let row = 0; row < total; row++) {
      if (data.first[row] !== row || !data.bytes[row]) continue;
      const parts = segments(row), last = parts.pop();
      let node = root;
      for (const part of parts) {
        if (!node.modules.has(part)) node.modules.set(part, { name: part, row: -1, modules: new Map(), leaves: [] });
        node = node.modules.get(part);
      }
      node.leaves.push({ name: last, row, children: [] });
    }
    return numbered(merged(root, true), null);
  }

  function merged(node, isRoot) {
    const children = [...node.modules.values()].map((child) => merged(child, false)).concat(node.leaves);
    if (children.length === 1 && !isRoot) {
      const [child] = children;
      return { ...child, name: node.name + (child.name.startsWith("[") ? "" : ".") + child.name };
    }
    return { name: node.name, row: -1, children };
  }

  function numbered(node, parent) {
    Object.assign(node, { parent, id: nodes.length, begin: leaves.length });
    nodes.push(node);
    if (node.row >= 0) leaves.push(node.row);
    node.bytes = node.row >= 0 ? data.bytes[node.row] : 0;
    node.elements = node.row >= 0 ? data.numel[node.row] : 0;
    for (const child of node.children) {
      numbered(child, node);
      node.bytes += child.bytes;
      node.elements += child.elements;
    }
    node.end = leaves.length;
    node.children.sort((a, b) => b.bytes - a.bytes);
    return node;
  }

  const rowsIn = (node) => leaves.slice(node.begin, node.end);

  function fullName(node) {
    const parts = [];
    for (let at = node; at.parent; at = at.parent) parts.unshift(at.name);
    return visible(parts.join(".").replaceAll(".[", "["));
  }

  // -- the treemap

  const COLOURS = {
    kind: ["kind", (row) => data.kind[row]],
    dtype: ["dtype", (row) => data.dtype[row]],
    device: ["device", (row) => data.device[row]],
  };
  const STEPS = [[0, "the same"], [1e-4, "rel. L2 to 0.0001"], [1e-3, "to 0.001"], [1e-2, "to 0.01"],
    [0.1, "to 0.1"], [Infinity, "above 0.1, or NaN or Inf in one"]];
  const ranks = new Map(); // for each way to colour: the words by their bytes, so that the largest has the first colour

  function rankOf(by, text) {
    if (!ranks.has(by)) {
      const sums = new Map();
      for (const row of leaves) {
        const key = COLOURS[by][1](row);
        sums.set(key, (sums.get(key) || 0) + data.bytes[row]);
      }
      ranks.set(by, [...sums].sort((a, b) => b[1] - a[1]).map(([key]) => key));
    }
    return Math.min(ranks.get(by).indexOf(text), 8);
  }

  /** The class of the colour of a node, and the words for it. */
  function colour(by, node) {
    const rows = rowsIn(node);
    if (by === "numbers") {
      const bad = rows.filter(nonfinite).length, odd = rows.filter((row) => suspicions(row).length).length;
      if (bad) return ["r5", "NaN or Inf"];
      return odd ? ["r3", "suspicious"] : ["r0", "nothing suspicious"];
    }
    if (by === "change") {
      const fates = new Set(rows.map(fate));
      if (fates.size === 1) {
        const [only] = fates;
        const known = { "only in A": "c3", "only in B": "c2", renamed: "c6", "not compared": "c8" }[only];
        if (known) return [known, only];
      }
      const known = rows.map((row) => (diff.nonfinite[row] ? Infinity : figure("rel_l2", row))).filter((value) => value !== null);
      if (!known.length) return ["c4", "changed"];
      const most = known.reduce((a, b) => Math.max(a, b)), step = STEPS.findIndex(([limit]) => most <= limit);
      return ["r" + step, STEPS[step][1]];
    }
    const sums = new Map();
    for (const row of rows) {
      const key = COLOURS[by][1](row);
      sums.set(key, (sums.get(key) || 0) + data.bytes[row]);
    }
    const [text] = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a));
    return ["c" + rankOf(by, text), text];
  }

  /** The units of the area: the name, and the words for an amount. */
  const UNITS = { bytes: ["bytes", size], elements: ["parameters", (value) => plural(value, "element")] };

  /** Lay nodes out in a box so that each is as square as can be (Bruls, Huizing and van Wijk, 2000). */
  function squarified(nodes, unit, box, each) {
    const children = nodes.filter((child) => child[unit]).sort((a, b) => b[unit] - a[unit]);
    let { x, y, w, h } = box, left = children.reduce((sum, child) => sum + child[unit], 0), at = 0;
    while (at < children.length && left > 0 && w > 0 && h > 0) {
      const side = Math.min(w, h), scale = (w * h) / left;
      let sum = 0, worst = Infinity, end = at;
      for (; end < children.length; end++) {
        const next = sum + children[end][unit] * scale;
        const ratio = Math.max((side * side * children[at][unit] * scale) / (next * next),
          (next * next) / (side * side * children[end][unit] * scale));
        if (ratio > worst) break;
        [sum, worst] = [next, ratio];
      }
      const thick = sum / side;
      let along = w < h ? x : y;
      for (; at < end; at++) {
        const long = (children[at][unit] * scale) / thick;
        each(children[at], w < h ? { x: along, y, w: long, h: thick } : { x, y: along, w: thick, h: long });
        [along, left] = [along + long, left - children[at][unit]];
      }
      if (w < h) [y, h] = [y + thick, h - thick];
      else [x, w] = [x + thick, w - thick];
    }
  }

  /** The levels below a node that are shown: whole ones, as many as there is room for. */
  function depthOf(children) {
    let depth = 1, sum = children.length, level = children;
    for (;;) {
      level = level.flatMap((child) => child.children);
      sum += level.length;
      if (!level.length || sum > MOST) return depth;
      depth++;
    }
  }

  function treemap(root) {
    const section = within("map");
    let top = root, placed = [], current = -1, by = diff ? "change" : "kind", unit = "bytes";
    const picture = drawn("svg", { tabindex: 0, role: "application", "aria-describedby": "map-keys", "aria-label": "Treemap",
      onclick: (event) => choose(Number(event.target.dataset.place ?? -1)),
      onpointermove: (event) => mark(Number(event.target.dataset.place ?? -1)), onkeydown: key, onfocus: () => current < 0 && mark(0) });
    const readout = element("p", { class: "readout", role: "status" });
    const trail = element("nav", { "aria-label": "Modules", class: "trail" });
    const legend = element("ul", { class: "legend" });
    const beside = element("div", {});
    const ways = [...Object.entries(COLOURS).map(([value, [text]]) => [value, text]),
      ...(stats ? [["numbers", "NaN, Inf and suspicious"]] : []), ...(diff ? [["change", "change (the largest in a module)"]] : [])];
    const select = element("select", { onchange: () => ((by = select.value), draw()) },
      ...ways.map(([value, text]) => element("option", { value, selected: value === by }, text)));
    const area = element("select", { onchange: () => ((unit = area.value), draw()) },
      ...Object.entries(UNITS).map(([value, [text]]) => element("option", { value }, text)));
    const amount = (node) => UNITS[unit][1](node[unit]);
    section.append(
      element("div", { class: "tools" }, trail, element("label", {}, "Area ", area), element("label", {}, "Colour by ", select)), picture, readout, legend,
      element("p", { class: "aside", id: "map-keys" },
        "Click or Enter opens, arrows move, Escape goes back. Tensors with the same elements count once."),
      element("details", { open: matchMedia("(min-width: 700px)").matches }, element("summary", {}, "The same as a table"), beside));
    section.hidden = false;

    function show(node) {
      [top, current] = [node, -1];
      while (top.children.length === 1 && top.children[0].row < 0) [top] = top.children;
      draw();
    }

    function draw() {
      let children = top.children;
      if (children.length > MOST) {
        const rest = children.slice(MOST - 1), sum = (of) => rest.reduce((all, child) => all + child[of], 0);
        const few = { name: count(rest.length) + " more", row: -1, children: rest, bytes: sum("bytes"), elements: sum("elements"), begin: rest[0].begin, end: rest[0].end };
        children = children.slice(0, MOST - 1).concat({ ...few, parent: top, id: -1 });
      }
      const depth = depthOf(children), w = picture.clientWidth || section.clientWidth || 800;
      const h = Math.round(Math.min(Math.max(w * 0.5, 260), 520));
      placed = [];
      place(children, { x: 0, y: 0, w, h }, depth);
      picture.setAttribute("viewBox", `0 0 ${w} ${h}`);
      picture.replaceChildren(...placed.flatMap(shape));
      legend.replaceChildren(...keys().map(([name, text]) => element("li", { class: name }, element("i", { class: name }), visible(text))));
      trail.replaceChildren(...crumbs());
      beside.replaceChildren(modules());
      readout.textContent = amount(top) + " in " + plural(top.end - top.begin, "tensor") + (top.parent ? " of " + fullName(top) : "");
    }

    function place(children, box, depth) {
      squarified(children, unit, box, (node, { x, y, w, h }) => {
        if (w < 1 || h < 1) return;
        const open = depth > 1 && node.children.length && w > 12 && h > 12;
        placed.push({ node, x, y, w, h, open });
        if (!open) return;
        const head = w > 50 && h > 40 ? 15 : 2;
        place(node.children, { x: x + 2, y: y + head, w: w - 4, h: h - head - 2 }, depth - 1);
      });
    }

    function shape({ node, x, y, w, h, open }, at) {
      const name = open ? "group" : colour(by, node)[0];
      const made = [drawn("rect", { class: name, x: x.toFixed(1), y: y.toFixed(1), width: w.toFixed(1), height: h.toFixed(1), "data-place": at })];
      const room = Math.floor((w - 6) / 6.6);
      if (room > 3 && h > (open ? 40 : 14)) made.push(drawn("text", { x: (x + 3).toFixed(1), y: (y + 11.5).toFixed(1) }, middle(label(node.name), room)));
      return made;
    }

    function keys() {
      const seen = new Map(placed.filter(({ open }) => !open).map(({ node }) => colour(by, node)));
      return [...seen].sort(([a], [b]) => (a < b ? -1 : 1));
    }

    function crumbs() {
      const chain = [];
      for (let node = top; node; node = node.parent) chain.unshift(node);
      return chain.flatMap((node, place) => [
        ...(place ? [" › "] : []),
        element("button", { type: "button", "aria-current": node === top ? "true" : null, onclick: () => go(node) },
          node.parent ? middle(label(node.name), 30) : "everything"),
      ]);
    }

    function modules() {
      const shown = top.children.slice(0, LISTED);
      const rows = shown.map((node) => [
        element("button", { type: "button", class: "link", title: visible(node.name), onclick: () => go(node) }, middle(label(node.name), 40)),
        size(node.bytes), percent(node.bytes, top.bytes), count(node.end - node.begin)]);
      const more = top.children.length - shown.length;
      return element("div", {}, table("Bytes by module", ["module", "bytes", "share", "tensors"], rows), more ? element("p", { class: "more" }, `and ${count(more)} more`) : "");
    }

    function mark(at) {
      if (at < 0 || at === current) return;
      picture.querySelector(".marked")?.classList.remove("marked");
      picture.querySelector(`[data-place="${at}"]`)?.classList.add("marked");
      current = at;
      const { node } = placed[at];
      readout.textContent = `${node.id < 0 ? node.name : fullName(node)}: ${amount(node)}, ${percent(node[unit], root[unit])}, ` +
        (node.row >= 0 ? `${data.dtype[node.row]} ${data.shape[node.row]}` : plural(node.end - node.begin, "tensor")) +
        (by in COLOURS && node.row < 0 ? "" : `, ${colour(by, node)[1]}`);
    }

    function choose(at) {
      if (at >= 0) go(placed[at].node);
    }

    function go(node) {
      if (node.id < 0) show(node);
      else location.hash = node.row >= 0 ? "/tensor/" + node.row : "/module/" + node.id;
    }

    function key(event) {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (step) mark(neighbour(step));
      else if (event.key === "Enter") choose(current);
      else if (event.key === "Escape" && top.parent) go(top.parent);
      else return;
      event.preventDefault();
    }

    /** The nearest rectangle in a direction, among those that nothing is drawn in. */
    function neighbour([dx, dy]) {
      const middleOf = ({ x, y, w, h }) => [x + w / 2, y + h / 2];
      const from = middleOf(placed[Math.max(current, 0)]);
      let best = current, least = Infinity;
      placed.forEach((item, at) => {
        const [x, y] = middleOf(item), ahead = (x - from[0]) * dx + (y - from[1]) * dy;
        const aside = Math.abs((x - from[0]) * dy) + Math.abs((y - from[1]) * dx);
        if (!item.open && at !== current && ahead > 1 && ahead + 2 * aside < least) [best, least] = [at, ahead + 2 * aside];
      });
      return best;
    }

    new ResizeObserver(() => picture.clientWidth !== picture.viewBox.baseVal.width && draw()).observe(picture);
    show(root);
    return show;
  }

  // -- the table of all tensors

  const CELLS = {
    name: (row) => data.name[row] || ".",
    fate,
    dtype: (row) => data.dtype[row],
    shape: (row) => data.shape[row],
    bad: nonfinite,
    chart: (row) => (stats.std[row] === null ? null : Number(stats.std[row])),
  };
  for (const by of ["rel_l2", "cosine", "max_abs"]) CELLS[by] = (row) => figure(by, row);

  const valueOf = (by) => CELLS[by] || ((row) => (by === "bytes" ? data.bytes[row] : stats[by][row]));

  function cell(by, row) {
    if (by === "name") {
      const dict = data.dict[row], narrow = innerWidth < 600;
      return element("a", { href: "#/tensor/" + row, tabindex: -1, title: visible(data.path[row]) },
        dict && !narrow ? element("small", {}, middle(visible(dict), 20) + " › ") : "", middle(visible(data.name[row] || "."), narrow ? 34 : 60));
    }
    if (by === "bytes") return size(data.bytes[row]);
    if (by === "chart") return stats.counts[row] ? chart(stats.counts[row]) : middle(visible(stats.reason[row]), 30);
    if (by === "bad") {
      const sides = diff ? [["A: ", stats], ["B: ", other]] : [["", stats]];
      return sides.flatMap(([side, from]) => [[from.nans[row], "NaN"], [from.infs[row], "Inf"]].filter(([value]) => value)
        .map(([value, text]) => `${side}${count(value)} ${text}`)).join(", ");
    }
    if (by === "dtype" || by === "shape" || by === "fate") return visible(valueOf(by)(row));
    return exact(valueOf(by)(row), by);
  }

  function chart(counts, w = 60, h = 20) {
    if (counts.length < 2) return "";
    const most = Math.max(...counts), wide = w / counts.length;
    const bars = counts.map((value, place) => value ? `M${place * wide} ${h}v${-Math.max((h * value) / most, 1)}h${wide - 1}V${h}z` : "");
    return drawn("svg", { class: "chart", width: w, height: h, viewBox: `0 0 ${w} ${h}`, "aria-hidden": "true" }, drawn("path", { d: bars.join("") }));
  }

  function tensors() {
    const grid = within("tensors"), frame = grid.parentElement, body = grid.tBodies[0];
    const columns = [...grid.tHead.rows[0].cells].map((head) => ({ head, by: head.dataset.by, right: head.classList.contains("n") }));
    const all = Array.from({ length: total }, (_, row) => row);
    let view = all, order = { by: "", down: false }, current = 0, printing = false, folded = null;
    within("rest")?.remove();

    const search = element("input", { type: "search", placeholder: "text, or a glob: *.weight", "aria-label": "Search names", oninput: filter });
    const odd = element("input", { type: "checkbox", onchange: filter });
    const changed = diff ? all.filter((row) => fate(row) !== "same") : [];
    const fates = diff ? [...new Set(diff.fate)] : [];
    const select = element("select", { "aria-label": "Change", onchange: filter }, element("option", { value: "" }, "all tensors"),
      ...(changed.length && changed.length < total ? [element("option", { value: CHANGED, selected: true }, "changed")] : []),
      ...fates.map((text) => element("option", {}, text)));
    const status = element("span", { role: "status" });
    const suspicious = stats ? all.filter((row) => suspicions(row).length) : [];
    frame.before(element("div", { class: "tools" }, search, diff ? select : "",
      stats ? element("label", {}, odd, ` only suspicious (${count(suspicious.length)})`) : "", status));
    for (const { head, by } of columns) {
      head.replaceChildren(element("button", { type: "button", onclick: () => sort(by) }, head.textContent));
    }
    grid.classList.add("virtual");
    frame.addEventListener("scroll", () => requestAnimationFrame(render));
    grid.addEventListener("keydown", key);
    body.addEventListener("click", (event) => {
      const link = event.target.closest("tr")?.querySelector("a");
      if (link && !event.target.closest("a")) location.hash = link.hash;
    });
    addEventListener("beforeprint", () => ((printing = true), render()));
    addEventListener("afterprint", () => ((printing = false), render()));

    function filter() {
      const text = search.value.trim();
      let rows = odd.checked ? suspicious : all;
      if (select.value === CHANGED) rows = rows.filter((row) => fate(row) !== "same");
      else if (select.value) rows = rows.filter((row) => fate(row) === select.value);
      if (/[*?]/.test(text)) {
        const glob = new RegExp("^" + text.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".") + "$", "is");
        rows = rows.filter((row) => glob.test(data.name[row]) || glob.test(data.path[row]));
      } else if (text) {
        const small = text.toLowerCase();
        folded = folded || data.name.map((name) => name.toLowerCase());
        rows = rows.filter((row) => folded[row].includes(small) || (small.includes("[") && data.path[row].toLowerCase().includes(small)));
      }
      view = rows;
      arrange();
    }

    function sort(by) {
      const numeric = columns.find((column) => column.by === by).right || by === "chart";
      if (order.by !== by) order = { by, down: numeric };
      else order = order.down === numeric ? { by, down: !numeric } : { by: "", down: false };
      for (const column of columns) {
        column.head.removeAttribute("aria-sort");
        if (column.by === order.by) column.head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      }
      filter();
    }

    function arrange() {
      if (order.by) {
        const value = valueOf(order.by), sign = order.down ? -1 : 1;
        const texts = ["name", "dtype", "shape", "fate"].includes(order.by);
        const keys = []; // by row
        for (const row of view) keys[row] = texts ? value(row) : value(row) === null ? NaN : Number(value(row));
        view = [...view].sort((a, b) => {
          const one = keys[a], two = keys[b];
          if (one === two) return a - b;
          if (one !== one || two !== two) return (one !== one) - (two !== two) || a - b; // what is not known comes last
          return one < two ? -sign : sign;
        });
      }
      status.textContent = view.length === total ? plural(total, "tensor") : `${count(view.length)} of ${plural(total, "tensor")}`;
      [current, frame.scrollTop] = [0, 0];
      render();
    }

    function render() {
      const most = printing ? 60 : Math.ceil((frame.clientHeight || 600) / ROW) + 12;
      const begin = printing ? 0 : Math.max(Math.min(Math.floor(frame.scrollTop / ROW) - 6, view.length - most), 0);
      const shown = view.slice(begin, begin + most);
      const left = view.length - begin - shown.length, below = printing ? 0 : left;
      grid.setAttribute("aria-rowcount", view.length + 1);
      const focused = body.contains(document.activeElement);
      body.replaceChildren(...space(begin), ...shown.map((row, place) => line(row, begin + place)), ...space(below));
      if (printing && left) body.append(element("tr", {}, element("td", { colspan: columns.length }, `and ${count(left)} more`)));
      if (focused) body.querySelector("a[tabindex='0']")?.focus({ preventScroll: true });
    }

    function space(rows) {
      const gap = element("tr", { class: "gap", "aria-hidden": "true" }, element("td", { colspan: columns.length }));
      gap.firstChild.style.height = rows * ROW + "px";
      return rows ? [gap] : [];
    }

    function line(row, place) {
      const marks = suspicions(row);
      const tone = nonfinite(row) ? "bad" : marks.length ? "doubtful" : null;
      const made = element("tr", { "aria-rowindex": place + 2, class: tone, title: marks.join(", ") || null },
        ...columns.map(({ by, right }) => by === "name" ? element("th", { scope: "row" }, cell(by, row)) : element("td", { class: right ? "n" : null }, cell(by, row))));
      if (place === current) made.querySelector("a").tabIndex = 0;
      return made;
    }

    function key(event) {
      const page = Math.max(Math.floor(frame.clientHeight / ROW) - 2, 1);
      const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined || !body.contains(event.target)) return;
      event.preventDefault();
      current = Math.max(Math.min(current + step, view.length - 1), 0);
      const top = current * ROW, head = grid.tHead.offsetHeight;
      if (top < frame.scrollTop) frame.scrollTop = top;
      else if (top + ROW + head > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + ROW + head - frame.clientHeight;
      render();
      body.querySelector("a[tabindex='0']")?.focus({ preventScroll: true });
    }

    filter();
  }

  // -- the details of a tensor

  const COUNTED = [["min", "min"], ["max", "max"], ["mean", "mean"], ["std", "std"], ["norm", "norm"], ["zeros", "zeros"], ["nans", "NaN"],
    ["infs", "Inf"]];
  const dialog = element("dialog", { "aria-labelledby": "tensor-name", onclose: () => history.replaceState(null, "", "#"), onclick: (event) => event.target === dialog && dialog.close() });
  document.body.append(dialog);

  function link(row) {
    return element("a", { href: "#/tensor/" + row }, middle(visible(data.path[row]), 60));
  }

  function pairs(items) {
    return element("dl", {}, ...items.filter(([, value]) => value !== "").map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  function details(row) {
    const path = data.path[row], shown = visible(path), parts = [];
    parts.push(element("div", { class: "top" }, element("h2", { id: "tensor-name" }, shown),
      element("button", { type: "button", class: "close", "aria-label": "Close", autofocus: true, onclick: () => dialog.close() }, "×")));
    parts.push(pairs([["dtype", data.dtype[row]], ["shape", visible(data.shape[row])], ["elements", count(data.numel[row])],
      ["bytes", size(data.bytes[row])], ["kind", data.kind[row]], ["device", visible(data.device[row])],
      ["class", visible(data.class[row])], ["requires_grad", data.grad[row] ? "yes" : ""], ["suspicious", suspicions(row).join(", ")],
      ["same elements as", data.first[row] !== row ? link(data.first[row]) : ""],
      ["state of", data.owner[row] !== null ? link(data.owner[row]) : ""]]));
    if (diff) parts.push(...difference(row));
    if (stats) parts.push(...numbers(row));
    const together = !data.storage[row] ? [] : all((at) => at !== row && data.storage[at] === data.storage[row]);
    if (together.length) parts.push(element("h3", {}, "In the same storage"), list(together));
    const states = all((at) => data.owner[at] === row);
    if (states.length) {
      const columns = stats ? ["min", "max", "mean", "std"] : [];
      parts.push(element("h3", {}, "Optimizer state"), table("Optimizer state", ["state", "shape", "bytes", ...columns],
        states.map((at) => [link(at), visible(data.shape[at]), size(data.bytes[at]), ...columns.map((by) => exact(stats[by][at]))])));
    }
    if (shown === path && fate(row) !== "only in B") {
      const quoted = /^[\w@%+=:,./-]+$/.test(path) ? path : "'" + path.replaceAll("'", "'\\''") + "'";
      parts.push(command(`ckptool get ${data.file} ${quoted || "."}`));
    }
    dialog.replaceChildren(...parts);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }

  function all(wanted) {
    const rows = [];
    for (let row = 0; row < total; row++) if (wanted(row)) rows.push(row);
    return rows;
  }

  function list(rows) {
    const more = rows.length > LISTED ? [element("li", {}, `and ${count(rows.length - LISTED)} more`)] : [];
    return element("ul", {}, ...rows.slice(0, LISTED).map((row) => element("li", {}, link(row))), ...more);
  }

  function command(text) {
    return element("pre", { class: "command" }, element("code", {}, visible(text)), copier(text));
  }

  function difference(row) {
    const parts = [element("h3", {}, "Change")];
    const names = [["rel_l2", "relative L2"], ["cosine", "cosine"], ["max_abs", "max |Δ|"], ["mean_abs", "mean |Δ|"],
      ["differing", "elements that differ"], ["nonfinite", "NaN or Inf in one"]];
    parts.push(pairs([["change", fate(row)], ["in B", visible(diff.partner[row])], ["why no figures", visible(diff.reason[row])],
      ...names.filter(([name]) => diff[name][row] !== null).map(([name, text]) => [text, exact(diff[name][row], name)])]));
    if (diff.changes[row].length) parts.push(element("ul", {}, ...diff.changes[row].map((text) => element("li", {}, visible(text)))));
    return parts;
  }

  function numbers(row) {
    if (stats.reason[row]) return [element("p", {}, "No numbers: " + visible(stats.reason[row]))];
    const sides = other && other.min[row] !== null ? [["A", stats], ["B", other]] : [["", stats]];
    const rows = COUNTED.filter(([by]) => sides.some(([, side]) => side[by][row] !== null)).map(([by, text]) => [text, ...sides.map(([, side]) => exact(side[by][row]))]);
    const of = stats.of[row];
    const parts = [element("h3", {}, "Numbers"), of && of !== "elements" ? element("p", { class: "aside" }, "of " + visible(of)) : ""];
    for (const [side, from] of sides) if (from.counts[row]) parts.push(histogram(side, from, row));
    parts.push(table("Numbers", ["number", ...sides.map(([side]) => side || "value")], rows));
    return parts;
  }

  function figureOf(text, picture, headings, rows) {
    return element("figure", {}, element("figcaption", {}, text), picture, element("details", {}, element("summary", {}, "As a table"), table(text, headings, rows)));
  }

  function histogram(side, from, row) {
    const counts = from.counts[row], low = Number(from.min[row]), high = Number(from.max[row]), bins = counts.length;
    const edge = (place) => low * (1 - place / bins) + high * (place / bins);
    const text = `${side ? side + ": " : ""}${number(low)} to ${number(high)} in ${plural(bins, "step")}`;
    return figureOf(text, chart(counts, 600, 90), ["from", "to", "elements"], counts.map((value, place) => [number(edge(place)), number(edge(place + 1)), count(value)]));
  }

  // -- all together

  for (const block of document.querySelectorAll("pre.command")) block.append(copier(block.textContent));
  const root = total ? grown() : null;
  const show = root && root.children.length && within("map") ? treemap(root) : () => {};
  if (total) tensors();

  function route() {
    const [, kind, id] = location.hash.match(/^#\/(tensor|module)\/(\d+)$/) || [];
    if (kind === "tensor" && Number(id) < total) return details(Number(id));
    if (dialog.open) dialog.close();
    if (kind === "module" && nodes[id]) show(nodes[id]);
    else if (!location.hash && root) show(root);
    return undefined;
  }

  addEventListener("hashchange", route);
  route();
  document.documentElement.dataset.ready = "yes";
})();
