// The models of the container: which are loaded, what they hold, who waits; loading and unloading.

import { useState } from "./hooks.module.js";
import { clean, gib, seconds, word } from "./format.js";
import { html, post } from "./session.js";
import { t } from "./strings.js";

const held = (places) =>
  Object.entries(places ?? {})
    .map(([place, mib]) => `${gib(mib)} GiB ${place === "host" ? t("ram") : clean(place)}`)
    .join(", ");

function kept(row) {
  if (!row.is_loaded) return "";
  if (row.answering) return t("running", row.answering);
  const left = row.keep_alive_s == null ? "" : ` · ${t("left", seconds(Math.max(0, row.keep_alive_s - row.idle_s)))}`;
  return `${t("idleFor", seconds(row.idle_s))}${row.is_pinned ? ` · ${t("pinned")}` : left}`;
}

export function Models({ fleet, model }) {
  const [problem, setProblem] = useState("");
  const send = async (name, isLoaded) => {
    const { status, body } = await post(isLoaded ? "/models/unload" : "/models/load", { model: name });
    setProblem(status === 200 ? "" : (body?.error?.message ?? t("noAnswer")));
  };
  const waiting = Object.fromEntries(fleet.waiting.map((row) => [row.name, row]));
  return html`<section id="models" aria-labelledby="models-title"><h2 id="models-title">${t("models")}</h2>
    <div class="wide tall" tabindex="0" role="region" aria-label=${`${t("models")}: ${t("asTable")}`}><table>
      <thead><tr>${["name", "state", "memory", "use", "load", "reason"].map((name) => html`<th scope="col">${t(name)}</th>`)}
        <td></td></tr></thead>
      <tbody>
        ${fleet.models.map(
          (row) => html`<tr key=${row.name}>
            <th scope="row">${row.name === model ? clean(row.name) : html`<a href=${`/?model=${encodeURIComponent(row.name)}`}>${clean(row.name)}</a>`}</th>
            <td><span class=${`pill ${row.is_loaded ? "ready" : ""}`}>${word("phase", row.state)}</span></td>
            <td>${held(row.holds_mib)}</td><td>${kept(row)}</td>
            <td class="number">${row.loads ? seconds(row.reload_s) : "–"}</td>
            <td>${clean(waiting[row.name]?.reason ?? row.why)}</td>
            <td><button type="button" class="plain" disabled=${row.is_loading} aria-label=${`${t(row.is_loaded ? "unload" : "load")} ${clean(row.name)}`}
              onClick=${() => send(row.name, row.is_loaded)}>${t(row.is_loaded ? "unload" : "load")}</button></td>
          </tr>`,
        )}
      </tbody>
    </table></div>
    <p role="status">${clean(problem) || clean(fleet.events.at(-1) ?? "")}</p>
  </section>`;
}
