// The dashboard: five views of what the stream of events tells.

import { h, render } from "./preact.module.js";
import { useEffect, useState } from "./hooks.module.js";
import { Curve } from "./curve.js";
import { Models } from "./fleet.js";
import { clean, clock, count, gib, seconds, share, speed, word } from "./format.js";
import { html, Login, post } from "./session.js";
import { MODEL, watch } from "./stream.js";
import { write } from "./storage.js";
import { language, switchLanguage, t } from "./strings.js";

const LATEST = 100;
const FAILED = new Set(["error", "stopped"]);
const BUSY = new Set(["starting", "fetching", "quantizing", "loading", "tuning", "restarting", "held"]);

/** Returns the state after an event. */
function after(state, name, document) {
  if (name === "requests") return { ...state, requests: document.requests };
  if (name === "request") {
    const others = (state.requests ?? []).filter((row) => row.id !== document.id);
    return { ...state, requests: [document, ...others].slice(0, LATEST) };
  }
  return { ...state, [name]: document };
}

function View({ id, title, children }) {
  return html`<section id=${id} aria-labelledby=${`${id}-title`}><h2 id=${`${id}-title`}>${title}</h2>${children}</section>`;
}

function Figure({ label, value, detail }) {
  return html`<div class="figure"><dt>${label}</dt><dd><strong>${value}</strong> <small>${detail}</small></dd></div>`;
}

/** Returns how far the phase is, 0 to 1; null if that is unknown. */
function doneOf(now) {
  const facts = now.facts ?? {};
  if (facts.bytes_total) return facts.bytes_done / facts.bytes_total;
  if (facts.seconds_left != null) return now.elapsed_s / Math.max(0.1, now.elapsed_s + facts.seconds_left);
  return null;
}

/** Returns how much is fetched and how fast; empty in other phases. */
function fetched(facts) {
  if (!facts?.bytes_total) return "";
  const rate = facts.bytes_per_s ? `, ${(facts.bytes_per_s / 1e6).toFixed(1)} MB/s` : "";
  const [unit, word] = facts.bytes_total < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return ` · ${(facts.bytes_done / unit).toFixed(1)} / ${(facts.bytes_total / unit).toFixed(1)} ${word}${rate}`;
}

/** Returns what the phase works on. The message of a fetch has the figures that stand beside it in the page's language. */
function doing(now, tuning, isMeasuring) {
  if (isMeasuring) return tuning.message;
  return (now.facts?.bytes_total && now.facts.file) || now.message;
}

function Phase({ now, tuning }) {
  const isMeasuring = now.phase === "ready" && tuning?.state === "measuring";
  const isBusy = BUSY.has(now.phase) || isMeasuring;
  const done = isBusy ? doneOf(now) : null;
  const left = now.facts?.seconds_left;
  const words = doing(now, tuning, isMeasuring);
  return html`<div class="phase">
    <p role="status"><strong class=${`pill ${now.phase}`}>${word("phase", now.phase)}</strong> ${clean(words)}${" "}
      <small>${t("since", seconds(now.elapsed_s))}${left != null ? ` · ${t("left", seconds(left))}` : ""}${fetched(now.facts)}</small></p>
    ${isBusy && html`<progress aria-label=${clean(words)} value=${done ?? undefined} max="1"></progress>`}
  </div>`;
}

function LastProblem({ log, now }) {
  const problems = (log?.lines ?? []).filter((line) => line.level !== "info");
  const last = problems.at(-1);
  const restarts = now.engine_restarts ? t("restarts", count(now.engine_restarts), count(now.engine_hangs)) : "";
  if (!last) return html`<p class="muted">${t("noProblem")} ${restarts}</p>`;
  return html`<div class=${`problem ${last.level}`}>
    <p><strong>${t("lastProblem")}</strong> (${t(last.level)}, <time>${clock(Date.parse(last.time) / 1000)}</time>,${" "}
      <code>${clean(last.event)}</code>${last.exit_code ? `, ${t("exitCode", last.exit_code)}` : ""}): ${clean(last.message)}</p>
    ${last.hint && html`<p>${clean(last.hint)}</p>`}
    ${restarts && html`<p>${restarts}</p>`}
  </div>`;
}

function Now({ state }) {
  const { now, plan, log, tuning } = state;
  return html`<${View} id="now" title=${t("now")}>
    <${Phase} now=${now} tuning=${tuning} />
    <dl class="figures">
      <${Figure} label=${t("tokensPerS")} value=${speed(now.tokens_per_s)} detail=${t("running", count(now.requests_running))} />
      <${Figure} label=${t("ttft")} value=${seconds(now.ttft_p50_s)}
        detail=${now.ttft_p95_s == null ? "" : t("ttftDetail", seconds(now.ttft_p95_s))} />
      <${Figure} label=${t("waiting")} value=${count(now.requests_waiting)} detail="" />
      <${Figure} label=${t("kvUse")} value=${share(now.kv_use)} detail=${plan?.context ? t("kvOf", count(plan.context)) : ""} />
      ${now.experts && html`<${Figure} label=${t("experts")} value=${share(now.experts.hits)}
        detail=${t("expertsDetail", now.experts.layer_ms)} />`}
    </dl>
    ${state.status?.slow_beside && html`<p class="problem">${clean(state.status.slow_beside)}</p>`}
    <${LastProblem} log=${log} now=${now} />
  </${View}>`;
}

function interval(range) {
  return range ? ` (${speed(range.low)} – ${speed(range.high)})` : "";
}

function Speeds({ plan, status }) {
  const predicted = plan.speed;
  const measured = status?.speeds?.measured;
  const at = measured?.at?.find((one) => one.depth >= (predicted?.prompt_tokens ?? 0)) ?? measured?.at?.at(-1);
  return html`<table class="speeds">
    <thead><tr><td></td><th scope="col">${t("predicted")}</th>
      <th scope="col">${t("measured")}${at ? ` @ ${count(at.depth)}` : ""}</th></tr></thead>
    <tbody>
      ${["decode", "prefill"].map(
        (what) => html`<tr><th scope="row">${t(what)}</th>
          <td class="number">${speed(predicted?.[`${what}_tokens_per_s`])}${interval(predicted?.[`${what}_interval`])}</td>
          <td class="number">${at ? speed(at[`${what}_tokens_per_s`]) : t("notMeasured")}</td></tr>`,
      )}
    </tbody>
  </table>`;
}

function Why({ state }) {
  const { plan, status } = state;
  if (!plan?.choices) return html`<${View} id="why" title=${t("why")}><p class="muted">${t("noPlan")}</p></${View}>`;
  const head = plan.head ?? {};
  return html`<${View} id="why" title=${t("why")}>
    <dl class="head">
      ${["context", "placement", "memory"].map((name) => head[name] && html`<div><dt>${t(name)}</dt><dd>${clean(head[name])}</dd></div>`)}
    </dl>
    <${Speeds} plan=${plan} status=${status} />
    <div class="wide tall" tabindex="0" role="region" aria-label=${`${t("why")}: ${t("asTable")}`}>
      <table>
        <thead><tr><th scope="col">${t("name")}</th><th scope="col">${t("value")}</th><th scope="col">${t("reason")}</th></tr></thead>
        <tbody>
          ${plan.choices.map(
            (choice) => html`<tr key=${choice.name} class=${choice.is_refusal ? "refused" : ""}>
              <th scope="row">${clean(choice.name)}</th><td>${clean(choice.value)}</td>
              <td>${clean(choice.reason)}${choice.detail && html` <small>${clean(choice.detail)}</small>`}
                <small class="source">${t("source")} ${clean(choice.source)}</small></td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <${Abilities} rows=${status?.abilities?.rows} />
    <${Checks} lines=${status?.checks?.lines} />
    ${head.command && html`<details><summary>${t("command")}</summary><pre tabindex="0"><code>${clean(head.command)}</code></pre></details>`}
  </${View}>`;
}

function Abilities({ rows }) {
  if (!rows?.length) return null;
  return html`<h3>${t("abilities")}</h3><div class="wide" tabindex="0" role="region" aria-label=${t("abilities")}><table>
    <thead><tr><th scope="col">${t("name")}</th><th scope="col">${t("result")}</th><th scope="col">${t("reason")}</th></tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr key=${row.name} class=${row.result === "failed" ? "refused" : ""}>
        <th scope="row">${clean(row.name)}</th><td>${t(row.result)}</td>
        <td>${clean(row.reason)}${row.then && html` <small>${clean(row.then)}</small>`}</td></tr>`,
    )}</tbody>
  </table></div>`;
}

function Checks({ lines }) {
  if (!lines?.length) return null;
  return html`<h3>${t("checks")}</h3><ul>${lines.map((line) => html`<li key=${line}>${clean(line)}</li>`)}</ul>`;
}

function Modes({ status }) {
  const [problem, setProblem] = useState("");
  const modes = status?.modes ?? [];
  if (modes.length < 2) return null;
  const isBusy = status.mode_switch?.state === "switching";
  const failure = status.mode_switch?.state === "failed" ? status.mode_switch.message : "";
  const choose = async (mode) => {
    setProblem(t("switching"));
    const { status: code, body } = await post("/appliance/v1/mode", { mode });
    setProblem(code === 200 || code === 202 ? "" : (body?.error?.message ?? t("noAnswer")));
  };
  return html`<fieldset class="modes"><legend>${t("modes")}</legend>
    ${modes.map(
      (one) => html`<label class="mode"><input type="radio" name="mode" checked=${one.mode === status.mode} disabled=${isBusy}
          onChange=${() => choose(one.mode)} /> ${clean(one.mode)}${" "}
        <small>${speed(one.decode_tokens_per_s)} ${t("decode")}, ${speed(one.prefill_tokens_per_s)} ${t("prefill")}${
          one.context ? `, ${count(one.context)} ${t("context")}` : ""
        }</small></label>`,
    )}
    <p role="status">${isBusy ? t("switching") : clean(problem || failure)}</p>
  </fieldset>`;
}

function CurveView({ state }) {
  const { profile, plan, status, tuning } = state;
  const at = status?.speeds?.predicted?.at?.[0];
  const predicted = at && { depth: at.depth, decode: at.decode_tokens_per_s, prefill: at.prefill_tokens_per_s };
  return html`<${View} id="curve" title=${t("curve")}>
    <${Curve} profile=${profile} tuning=${tuning} chosen=${plan?.key} predicted=${predicted} />
    <${Modes} status=${status} />
  </${View}>`;
}

function Requests({ state }) {
  const rows = (state.requests ?? []).filter((row) => !MODEL || row.model === state.now.model);
  const columns = ["time", "model", "route", "tokensIn", "cached", "tokensOut", "waited", "ttft", "tokensPerS", "ending", "slowedBy"];
  return html`<${View} id="requests" title=${t("requests")}>
    ${rows.length === 0
      ? html`<p class="muted">${t("noRequests")}</p>`
      : html`<div class="wide tall" tabindex="0" role="region" aria-label=${`${t("requests")}: ${t("asTable")}`}><table>
          <thead><tr>${columns.map((name) => html`<th scope="col">${t(name)}</th>`)}</tr></thead>
          <tbody>
            ${rows.map(
              (row) => html`<tr key=${row.id} class=${FAILED.has(row.ending) ? "failed" : ""}>
                <td><time>${clock(row.time)}</time></td><td>${clean(row.model)}</td><td>${clean(row.route)}</td>
                <td class="number">${count(row.tokens_in)}</td><td class="number">${count(row.tokens_cached)}${row.tokens_from_disk ? ` (${t("fromDisk", count(row.tokens_from_disk))})` : ""}</td>
                <td class="number">${count(row.tokens_out)}</td><td class="number">${seconds(row.waited_s)}</td>
                <td class="number">${seconds(row.ttft_s)}</td><td class="number">${speed(row.tokens_per_s)}</td>
                <td>${word("end", row.ending)}${FAILED.has(row.ending) ? ` (${row.status})` : ""}</td>
                <td>${(row.slowed_by ?? []).map(clean).join(", ")}</td>
              </tr>`,
            )}
          </tbody>
        </table></div>`}
  </${View}>`;
}

function Gpu({ gpu }) {
  const isNarrow = gpu.pcie_width < gpu.pcie_width_max;
  const link = gpu.pcie_width && t("link", gpu.pcie_generation ?? "?", gpu.pcie_width, gpu.pcie_generation_max ?? "?", gpu.pcie_width_max ?? "?");
  const power = gpu.power_limit_w && t("powerLimit", count(gpu.power_limit_w), count(gpu.power_limit_default_w));
  const holders = (gpu.holders ?? []).map((one) => `${clean(one.name ?? one.pid)} ${gib(one.used_mib)} GiB`).join(", ");
  const memory = gpu.vram_free_mib == null ? `${gib(gpu.vram_total_mib)} GiB` : t("free", gib(gpu.vram_free_mib), gib(gpu.vram_total_mib));
  const notes = [memory, link, power, holders && `${t("holders")}: ${holders}`, clean(gpu.problem ?? "")].filter(Boolean);
  return html`<div><dt>${t("gpu")} ${clean(gpu.index ?? "")}</dt><dd>${clean(gpu.name)}${" "}
    ${notes.map((note) => html`<small class=${note === link && isNarrow ? "narrow" : ""}>${note}</small>${" "}`)}</dd></div>`;
}

function Machine({ state }) {
  const { hardware, doctor, now, status } = state;
  const cpu = hardware?.cpu;
  const gpus = hardware?.gpus?.gpus ?? [];
  const losses = status?.losses ?? [];
  return html`<${View} id="machine" title=${t("machine")}>
    ${cpu && html`<dl class="head">
      <div><dt>${t("cpu")}</dt><dd>${clean(cpu.model_name)} <small>${t("cores", count(cpu.cores), count(cpu.threads_max))}</small></dd></div>
      <div><dt>${t("ram")}</dt><dd>${t("usable", gib(hardware.memory.usable_mib), gib(hardware.memory.total_mib))}</dd></div>
      ${hardware.volume && html`<div><dt>${t("volume")}</dt><dd>${clean(hardware.volume.path)}${" "}
        <small>${t("free", gib(hardware.volume.free_mib), gib(hardware.volume.total_mib))}</small></dd></div>`}
      ${gpus.length === 0
        ? html`<div><dt>${t("gpu")}</dt><dd>${t("noGpu")}${hardware.gpus?.problem ? `: ${clean(hardware.gpus.problem)}` : ""}</dd></div>`
        : gpus.map((gpu) => html`<${Gpu} gpu=${gpu} />`)}
      <div><dt>${t("watts")}</dt><dd>${now.watts == null ? t("unknown") : `${count(now.watts)} W`}</dd></div>
      <div><dt>${t("version")}</dt><dd>${clean(now.version)} ${status?.cell && html`<small>${clean(status.cell)}</small>`}</dd></div>
    </dl>`}
    ${losses.length > 0 && html`<h3>${t("losses")}</h3><ul>${losses.map(
      (one) => html`<li><strong>${clean(one.what)}</strong> ${clean(one.hint)}</li>`,
    )}</ul>`}
    <h3>${t("doctor")}</h3>
    ${doctor
      ? html`<ul class="doctor">${doctor.findings.map(
          (one) => html`<li class=${one.level}><span class="level">${t(one.level)}</span>${" "}<strong>${clean(one.name)}</strong>${" "}
            ${clean(one.what)} ${one.hint && html`<small>${clean(one.hint)}</small>`}</li>`,
        )}</ul>`
      : html`<p class="muted">${t("examining")}</p>`}
  </${View}>`;
}

function flipTheme(redraw) {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  write("theme", root.dataset.theme);
  redraw();
}

function Header({ state, redraw }) {
  const leave = async () => {
    await post("/logout", {});
    location.reload();
  };
  return html`<header>
    <h1>${t("title")} <span class="model">${clean(state.now?.model ?? "")}</span></h1>
    <nav aria-label=${t("title")}>
      <a href="/chat/">${t("chat")}</a>
      <button type="button" class="plain" onClick=${switchLanguage} lang=${language === "zh" ? "en" : "zh-CN"}>${t("language")}</button>
      <button type="button" class="plain" onClick=${() => flipTheme(redraw)} aria-label=${t("theme")} title=${t("theme")}>◐</button>
      <button type="button" class="plain" onClick=${leave}>${t("logout")}</button>
    </nav>
  </header>`;
}

function App() {
  const [state, setState] = useState({});
  const [link, setLink] = useState("connecting");
  const [reopen, setReopen] = useState(null);
  const [, redraw] = useState(0);
  useEffect(() => {
    const open = watch((name, document) => setState((before) => after(before, name, document)), setLink);
    setReopen(() => open);
  }, []);
  if (link === "login") {
    const done = () => {
      setLink("connecting");
      reopen();
    };
    return html`<${Login} onDone=${done} />`;
  }
  const isOne = !(state.fleet?.models.length > 1);
  const trouble = { connecting: "connecting", lost: "lost", full: "tooMany" }[link];
  return html`
    <${Header} state=${state} redraw=${() => redraw((times) => times + 1)} />
    ${trouble && html`<p class=${`banner ${link}`} role="status">${t(trouble)}</p>`}
    ${state.now &&
    html`<main class=${isOne ? "dashboard" : "dashboard several"}>
      <${Now} state=${state} />${!isOne && html`<${Models} fleet=${state.fleet} model=${state.now.model} />`}
      <${Why} state=${state} /><${CurveView} state=${state} /><${Requests} state=${state} /><${Machine} state=${state} />
    </main>`}`;
}

document.title = t("title");
render(h(App), document.getElementById("app"));
