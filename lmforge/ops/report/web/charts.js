// Charts of the report, drawn as SVG. Their axis, zoom and scale are variables of report.js, with which it is one script.
// `least`: the smallest distance of two ticks.
function ticks(low, high, most, least = 0) {
  const rough = Math.max((high - low) / most || 1, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  // Counted: where a step is less than the last bit of the values, adding it would never arrive.
  const first = Math.ceil(low / step - 1e-9), count = Math.min(Math.floor(high / step + 1e-9) - first, 4 * most);
  const found = [];
  for (let index = 0; index <= count; index++) found.push((first + index) * step + 0);
  return found.filter(Number.isFinite);
}

const LEFT = 52, RIGHT = 10, TOP = 6, BOTTOM = 22;  // of a drawing, beside what is drawn
// A box with a heading, a legend and a drawing. `draw(width)` fills it, each time that all are drawn.
function figure(heading, height, wide, draw) {
  const legend = element("div", { class: "legend", "aria-live": "off" });
  const svg = drawn("svg", { role: "img", "aria-label": heading, height });
  const box = element("div", { class: wide ? "chart wide" : "chart" }, element("h3", {}, heading), legend, svg);
  redraws.push(() => {
    const width = Math.max(240, box.clientWidth - 20);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    draw(width);
  });
  return { box, legend, svg };
}
// Labels the axis below, from x0 to x1. Returns where a value is on it.
function horizontal(svg, width, height, x0, x1) {
  const x = (value) => LEFT + (value - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  for (const tick of ticks(x0, x1, width < 420 ? 3 : 6, axis === "seconds" ? 0 : 1))
    svg.append(drawn("text", { x: x(tick), y: height - 6, "text-anchor": x(tick) > width - 40 ? "end" : "middle" }, onAxis(tick)));
  return x;
}
// A part of a legend, and the element of its value.
function legendItem(fill, label, text = "", dashed = false) {
  const value = element("b", {}, text), look = dashed ? `border: 2px dotted ${fill}` : `background: ${fill}`;
  return { item: element("span", {}, element("i", { style: look }), `${label} `, value), value };
}

// A chart of curves [{label, color, dashed, points: [[step, value]], run}]; drag to zoom all charts, double click to go back.
function chart(heading, curves, { wide = false } = {}) {
  const height = wide ? 280 : 210;
  let view = null, from = null;  // what is drawn: its bounds and curves; and where a drag began
  const { box, legend, svg } = figure(heading, height, wide, (width) => {
    view = null;
    const placed = curves.map((curve) => ({ ...curve, at: curve.points.map(([step, value]) => [along(curve.run, step), value]) }));
    const logScale = logarithmic && placed.every(({ at }) => at.every(([, y]) => y > 0));
    const scaled = logScale ? Math.log10 : (y) => y;
    const xs = placed.flatMap(({ at }) => at.map(([x]) => x));
    let [x0, x1] = zoom ?? [Math.min(...xs), Math.max(...xs)];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    const visible = placed.flatMap(({ at }) => at.filter(([x]) => x >= x0 && x <= x1).map(([, y]) => scaled(y)));
    if (!visible.length) { legend.textContent = "no values in this range"; return; }
    const [y0, y1] = bounds(visible);
    const y = (value) => height - BOTTOM - (value - y0) / (y1 - y0) * (height - TOP - BOTTOM);
    for (const tick of ticks(y0, y1, 5)) {
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(drawn("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(logScale ? 10 ** tick : tick)));
    }
    const x = horizontal(svg, width, height, x0, x1);
    const clip = drawn("clipPath", { id: `clip-${chart.count = (chart.count ?? 0) + 1}` });
    clip.append(drawn("rect", { x: LEFT - 4, y: 0, width: width - LEFT - RIGHT + 8, height: height - BOTTOM + 1 }));
    const inside = drawn("g", { "clip-path": `url(#${clip.id})` }), pointer = drawn("g");
    svg.append(clip, inside, pointer);
    for (const curve of placed) {
      const path = curve.at.map(([px, py], index) => `${index ? "L" : "M"}${x(px).toFixed(1)} ${y(scaled(py)).toFixed(1)}`).join("");
      inside.append(drawn("path", { class: "curve", d: path, style: `stroke: ${curve.color}`, ...(curve.dashed ? { "stroke-dasharray": "5 3" } : {}) }));
      if (curve.at.length < 40) for (const [px, py] of curve.at)
        inside.append(drawn("circle", { cx: x(px), cy: y(scaled(py)), r: 2.4, style: `fill: ${curve.color}` }));
    }
    if (wide && one) for (const event of runs[0].events) {
      const mark = EVENT_MARKS[event.kind];
      if (!mark || event.step === null || (event.kind === "start" && !event.step)) continue;
      const sign = drawn("text", { x: x(along(runs[0], event.step)), y: height - BOTTOM - 3, "text-anchor": "middle", ...(event.kind === "checkpoint" ? {} : { class: "alarm", style: "fill: var(--alarm)" }) }, mark);
      sign.append(drawn("title", {}, `${event.kind === "start" ? "restart" : event.kind} at step ${event.step.toLocaleString("en")}${event.reason ? `: ${event.reason}` : ""}`));
      inside.append(sign);
    }
    const shown = placed.map(({ color, label, dashed, at }) => ({ ...legendItem(color, label, "", dashed), at }));
    const where = element("span"), value = (px) => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
    legend.replaceChildren(...shown.map(({ item }) => item), where);
    view = { width, shown, where, pointer, value };
    show(null);
  });
  // The values at a place of the drawing, or the last ones; only the legend and two marks change.
  function show(px) {
    const x = px === null ? null : view.value(px);
    for (const { value, at } of view.shown) {
      const point = x === null ? at.at(-1) : nearest(at, x);
      value.textContent = point ? number(point[1]) : "–";
    }
    view.where.textContent = x === null ? "" : `${AXES[axis]} ${onAxis(nearest(view.shown[0].at, x)[0])}`;
    view.pointer.replaceChildren();
    if (x !== null) view.pointer.append(drawn("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: height - BOTTOM }));
    if (x !== null && from !== null) view.pointer.append(drawn("rect", { class: "selection", x: Math.min(from, px), y: TOP, width: Math.abs(px - from), height: height - TOP - BOTTOM }));
  }
  const place = (event) => {
    const area = svg.getBoundingClientRect(), px = (event.clientX - area.left) / area.width * view.width;
    return Math.min(Math.max(px, LEFT), view.width - RIGHT);
  };
  svg.addEventListener("pointermove", (event) => { if (view) show(place(event)); });
  svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && view) { from = place(event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointerup", (event) => {
    if (from === null || !view) return;
    const ends = [from, place(event)].sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] > 8) setZoom(ends.map(view.value));
  });
  svg.addEventListener("pointerleave", () => { if (view) show(null); });
  // A finger that is dragged reads values; tapped twice it zooms to a third of what is shown.
  let touched = false;
  svg.addEventListener("pointerup", (event) => { touched = event.pointerType !== "mouse"; });
  svg.addEventListener("dblclick", (event) => {
    if (!touched || zoom !== null || !view) { setZoom(null); return; }
    const middle = view.value(place(event)), sixth = (view.value(view.width - RIGHT) - view.value(LEFT)) / 6;
    setZoom([middle - sixth, middle + sixth]);
  });
  return box;
}
// The lowest and the highest value to draw.
function bounds(values) {
  // A few first values far above the rest would press the curve flat.
  const ordered = [...values].sort((a, b) => a - b), cap = ordered[Math.floor((ordered.length - 1) * 0.99)];
  let low = ordered[0], high = ordered.at(-1);
  if (values.length > 30 && high - low > 4 * (cap - low) && cap > low) high = cap + (cap - low) * 0.3;
  const size = Math.max(Math.abs(low), Math.abs(high));
  const room = high - low <= 1e-12 * size ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.05;
  return [low - room, high + room];
}
function setZoom(range) {
  zoom = range;
  document.getElementById("whole").hidden = range === null;
  redraws.forEach((draw) => draw());
}

// Where a step's time goes: waiting for data, waiting for a save, the rest; stacked, from the first log step to the last.
function strip(run) {
  if (run.step_times.length < 2) return null;
  const height = 66, high = 40, names = [["computing", color(0)], ["waiting for data", color(4)], ["waiting for a save", color(3)]];
  const parts = run.step_times.map(([step, seconds, waiting, saving]) => {
    const data = Math.min(1, waiting / seconds), save = Math.min(1 - data, saving / seconds);
    return [step, [1 - data - save, data, save]];
  });
  const { box, legend, svg } = figure("Where the time of a step goes", height, true, (width) => {
    const places = parts.map(([step]) => along(run, step));
    const [x0, x1] = zoom ?? [places[0], places.at(-1)];
    const scale = horizontal(svg, width, height, x0, x1), x = (value) => scale(Math.min(x1, Math.max(x0, value)));
    parts.forEach(([, shares], index) => {
      const a = x(index ? places[index - 1] : x0), b = x(places[index]);
      let y = 4;
      shares.forEach((share, which) => {
        if (b > a) svg.append(drawn("rect", { x: a, y, width: b - a + 0.4, height: share * high, style: `fill: ${names[which][1]}` }));
        y += share * high;
      });
    });
  });
  legend.append(...names.map(([name, fill], index) => {
    const mean = parts.reduce((sum, [, shares]) => sum + shares[index], 0) / parts.length;
    return legendItem(fill, name, `${(100 * mean).toFixed(1)} %`).item;
  }));
  return box;
}

// The first load, in hundredths of an even share, of each colour after the first, and what the colours are called.
const LOADS = [1, 25, 50, 80, 126, 201, 401], LOAD_NAMES = ["none", "< ¼", "¼ to ½", "½ to ⅘", "even", "1¼ to 2", "2 to 4", "> 4"];
// Cells of `rows` and of columns between `edges()`, coloured by `load(column, row)`; on the axis of the curves if `inTime`.
function heatMap(heading, rows, load, { edges, name, inTime = false }) {
  const size = Math.max(3, Math.min(18, Math.floor(420 / rows.length))), height = TOP + BOTTOM + size * rows.length;
  const where = element("span");
  let at = [];  // where columns begin and end in the drawing
  const { box, legend, svg } = figure(heading, height, false, (width) => {
    const values = edges(), [x0, x1] = (inTime ? zoom : null) ?? [values[0], values.at(-1)];
    const x = inTime ? horizontal(svg, width, height, x0, x1) : (value) => LEFT + value / x1 * (width - LEFT - RIGHT);
    if (!inTime) for (const tick of ticks(0, x1 - 1, 8, 1)) svg.append(drawn("text", { x: x(tick + 0.5), y: height - 6, "text-anchor": "middle" }, tick));
    at = values.map((value) => x(Math.min(x1, Math.max(x0, value))));
    for (const tick of ticks(0, rows.length - 1, Math.max(2, height / 40), 1))
      svg.append(drawn("text", { x: LEFT - 6, y: TOP + size * (tick + 0.5) + 4, "text-anchor": "end" }, rows[tick].split(" ")[1]));
    const paths = LOAD_NAMES.map(() => "");
    rows.forEach((_, row) => {
      for (let column = 0, begin = 0; column + 1 < at.length; column++) {
        const kind = colourOf(load(column, row));
        if (column + 2 < at.length && kind === colourOf(load(column + 1, row))) continue;
        if (at[column + 1] > at[begin]) paths[kind] += `M${at[begin].toFixed(1)} ${TOP + size * row}H${at[column + 1].toFixed(1)}v${size}H${at[begin].toFixed(1)}z`;
        begin = column + 1;
      }
    });
    paths.forEach((d, kind) => { if (d) svg.append(drawn("path", { class: "cell", d, style: `fill: var(--load${kind})` })); });
    legend.replaceChildren(...LOAD_NAMES.map((text, kind) => legendItem(`var(--load${kind})`, text).item), where);
  });
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / area.width;
    const px = (event.clientX - area.left) * scale, row = Math.floor(((event.clientY - area.top) * scale - TOP) / size);
    const column = lowerBound(at.length, (index) => at[index], px) - 1;
    const inside = column >= 0 && column + 1 < at.length && rows[row] !== undefined;
    where.textContent = inside ? `${name(column)}, ${rows[row]}: ${number(load(column, row) / 100)}` : "";
  });
  svg.addEventListener("pointerleave", () => { where.textContent = ""; });
  return box;
}
const colourOf = (load) => LOADS.filter((first) => load >= first).length;
