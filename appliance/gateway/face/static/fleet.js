// The models of the container: which are loaded, what they hold, who waits; loading and unloading.

import { useState } from "./hooks.module.js";
import { clean, gib, seconds, word } from "./format.js";
import { html, post } from "./session.js";
import { t } from "./strings.js";

const EVENTS = 3;
const COLUMNS = ["name", "state", "memory", "use", "loadTime"];

/** Returns what all loaded models hold together with what is free, MiB by place. */
function roomOf(fleet) {
  const room = { ...fleet.free_mib };
  for (const row of fleet.models) for (const place in room) room[place] += row.holds_mib[place] ?? 0;
  return room;
}

/** A bar for each place: what the model holds, against that and what is free or held by other models. */
function Held({ row, room }) {
  return Object.entries(row.holds_mib)
    .filter(([, mib]) => mib > 0)
    .map(([place, mib]) => {
      const words = `${gib(mib)} GiB ${place === "host" ? t("hostMemory") : clean(place)}`;
      const bar = room[place] && html`<meter min="0" max=${room[place]} value=${mib} aria-label=${t("ofRoom", words, gib(room[place]))}></meter>`;
      return html`<div key=${place}>${words}${bar}</div>`;
    });
}

/** Returns how long the model is idle, and until when it stays. */
function kept(row) {
  if (!row.is_loaded) return "";
  if (row.answering) return t("running", row.answering);
  const left = row.keep_alive_s == null ? t("stays") : t("left", seconds(Math.max(0, row.keep_alive_s - row.idle_s)));
  return `${t("idleFor", seconds(row.idle_s))}, ${row.is_pinned ? t("pinned") : left}`;
}

/** Returns who waits for the model and for what; else why it is loaded or is not. */
function reason(row, wish) {
  if (!wish) return clean(row.why);
  const who = wish.requests ? `${t("requestsWait", wish.requests, seconds(wish.seconds))}: ` : "";
  return `${who}${clean(wish.reason)}`;
}

function Row({ row, wish, room, isShown, onSend }) {
  const isWanted = row.is_loaded || row.is_loading || wish;
  const look = row.is_loaded ? "ready" : isWanted ? "" : "off";
  const act = t(row.is_loaded ? "unload" : isWanted ? "stop" : "load");
  return html`<tr>
    <th scope="row"><a href=${`/?model=${encodeURIComponent(row.name)}`} aria-current=${isShown ? "page" : undefined}>${clean(row.name)}</a>
      <small>${reason(row, wish)}</small></th>
    <td><span class=${`pill ${look}`}>${wish && !row.is_loading ? t("waits") : word("phase", row.state)}</span></td>
    <td><${Held} row=${row} room=${room} /></td><td>${kept(row)}</td>
    <td class="number">${row.loads ? "" : "≈ "}${seconds(row.reload_s)}</td>
    <td><button type="button" class="plain" aria-label=${`${act} ${clean(row.name)}`} onClick=${() => onSend(row.name, isWanted)}>${act}</button></td>
  </tr>`;
}

export function Models({ fleet, model }) {
  const [problem, setProblem] = useState("");
  const send = async (name, isWanted) => {
    const { status, body } = await post(isWanted ? "/models/unload" : "/models/load", { model: name });
    setProblem(status === 200 ? "" : (body?.error?.message ?? t("noAnswer")));
  };
  const waiting = Object.fromEntries(fleet.waiting.map((row) => [row.name, row]));
  const room = roomOf(fleet);
  return html`<section id="models" aria-labelledby="models-title"><h2 id="models-title">${t("models")}</h2>
    <div class="wide tall" tabindex="0" role="region" aria-label=${`${t("models")}: ${t("asTable")}`}><table>
      <thead><tr>${COLUMNS.map((name) => html`<th scope="col">${t(name)}</th>`)}<td></td></tr></thead>
      <tbody>${fleet.models.map(
        (row) => html`<${Row} key=${row.name} row=${row} wish=${waiting[row.name]} room=${room} isShown=${row.model === model} onSend=${send} />`,
      )}</tbody>
    </table></div>
    <p class="problem error" role="alert">${clean(problem)}</p>
    <div class="events" role="log" aria-label=${t("events")}>
      ${fleet.events.slice(-EVENTS).map((words) => html`<p>${clean(words)}</p>`)}
    </div>
  </section>`;
}
