// Decode and prefill over the depth of the context, by uPlot; and the same numbers as a table.

import { useEffect, useRef } from "./hooks.module.js";
import { count, clean, speed } from "./format.js";
import { html } from "./session.js";
import { t } from "./strings.js";

const HEIGHT = 172;

/** Returns the measured plans, the chosen one first: {key, isChosen, points: [{depth, decode, prefill}]}. */
export function curvesOf(profile, tuning, chosen) {
  const found = new Map();
  for (const { key, points } of [...(profile?.measurements ?? []), ...(tuning?.measurements ?? [])]) {
    const depths = found.get(key) ?? new Map();
    for (const { depth, decode_ms, prefill_ms } of points ?? []) {
      // A plan may be measured twice. Other work only slows a measurement, so the faster one counts, as in the plan.
      const before = depths.get(depth);
      const faster = (ms, known) => Math.max(ms > 0 ? 1000 / ms : 0, known ?? 0) || null;
      depths.set(depth, { depth, decode: faster(decode_ms, before?.decode), prefill: faster(prefill_ms, before?.prefill) });
    }
    if (depths.size) found.set(key, depths);
  }
  const curves = [...found].map(([key, depths]) => ({
    key,
    isChosen: key === chosen,
    points: [...depths.values()].sort((a, b) => a.depth - b.depth),
  }));
  return curves.sort((a, b) => Number(b.isChosen) - Number(a.isChosen));
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawn(curves, what, predicted) {
  const tables = curves.map((curve) => [
    curve.points.map((at) => at.depth),
    curve.points.map((at) => at[what]),
  ]);
  if (predicted) tables.push([[predicted.depth], [predicted[what]]]);
  return uPlot.join(tables);
}

function options(curves, what, predicted, width) {
  const axis = { stroke: color("--pico-muted-color"), grid: { stroke: color("--pico-muted-border-color"), width: 1 } };
  const series = curves.map((curve) => ({
    label: curve.key,
    stroke: curve.isChosen ? color("--pico-primary") : color("--pico-muted-color"),
    width: curve.isChosen ? 2.5 : 1,
    dash: curve.isChosen ? [] : [4, 4],
    points: { show: true, size: curve.isChosen ? 7 : 4 },
    spanGaps: true,
  }));
  if (predicted) series.push({ label: t("predicted"), stroke: color("--warn"), points: { show: true, size: 9, space: 0 } });
  const label = (_plot, values) => values.map((value) => (value == null ? "" : value >= 1000 ? `${value / 1000}k` : `${value}`));
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false, distr: 3, log: 10 }, y: { range: (_plot, _low, high) => [0, (high ?? 1) * 1.1] } },
    series: [{ label: t("depth") }, ...series],
    axes: [
      { ...axis, size: 26, values: label },
      { ...axis, size: 44, values: label },
    ],
    legend: { show: false },
    cursor: { show: false },
  };
}

function Plot({ curves, what, predicted }) {
  const place = useRef(null);
  const shown = JSON.stringify([curves, predicted, document.documentElement.dataset.theme]);
  useEffect(() => {
    const width = Math.max(200, place.current.clientWidth);
    const plot = new uPlot(options(curves, what, predicted, width), drawn(curves, what, predicted), place.current);
    const fit = () => plot.setSize({ width: Math.max(200, place.current?.clientWidth ?? width), height: HEIGHT });
    addEventListener("resize", fit);
    return () => {
      removeEventListener("resize", fit);
      plot.destroy();
    };
  }, [shown]);
  return html`<figure class="plot">
    <figcaption>${t(what)}, ${t("tokensPerS")}</figcaption>
    <div ref=${place} aria-hidden="true"></div>
  </figure>`;
}

export function Curve({ profile, tuning, chosen, predicted }) {
  const curves = curvesOf(profile, tuning, chosen);
  if (!curves.length) return html`<p class="muted">${t("noCurve")}</p>`;
  return html`
    <${Plot} curves=${curves} what="decode" predicted=${predicted} />
    <${Plot} curves=${curves} what="prefill" predicted=${predicted} />
    <p class="legend">
      <span class="line chosen"></span> ${t("chosen")} <span class="line other"></span> ${t("other")}${" "}
      <span class="dot"></span> ${t("predicted")} · ${t("depth")} →
    </p>
    <details>
      <summary>${t("asTable")}</summary>
      <div class="wide" tabindex="0" role="region" aria-label=${`${t("curve")}: ${t("asTable")}`}>
        <table>
          <thead><tr><th scope="col">${t("plan")}</th><th scope="col">${t("depth")}</th>
            <th scope="col">${t("decode")}</th><th scope="col">${t("prefill")}</th></tr></thead>
          <tbody>
            ${curves.flatMap((curve) =>
              curve.points.map(
                (at) => html`<tr>
                  <td>${curve.isChosen ? html`<strong>${clean(curve.key)}</strong>` : clean(curve.key)}</td>
                  <td class="number">${count(at.depth)}</td>
                  <td class="number">${speed(at.decode)}</td>
                  <td class="number">${speed(at.prefill)}</td>
                </tr>`,
              ),
            )}
          </tbody>
        </table>
      </div>
    </details>`;
}
