// The page: header, headline numbers, sections.
"use strict";

function header(run) {
  const { info } = run;
  const facts = [`mode ${info.mode}`, `seed ${info.seed}`];
  if (known(info.alpha)) facts.push(`alpha ${short(info.alpha)}`);
  if (info.started) facts.push(`started ${info.started.slice(0, 16).replace("T", " ")}`);
  return h(
    "header",
    {},
    h("div", { class: "title" }, h("h1", {}, run.label), h("span", { class: `status ${info.status}` }, info.status)),
    h("p", { class: "soft" }, facts.join(" · ")),
    info.reason ? h("p", { class: `notice ${info.status}` }, info.reason) : null,
  );
}

function tiles(run) {
  const { headline, info, iterations } = run;
  const tile = (name, value, note) =>
    h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
  const best = known(headline.best_success) ? `best ${fixed(headline.best_success)} at ${headline.best_step}` : "no evaluation yet";
  const asked = known(info.iterations) ? `of ${short(info.iterations)}` : "finished";
  const all = [
    tile("Final success", fixed(headline.final_success), best),
    tile("Reward", short(lastKnown(column(run, "reward/mean"))), "last batch"),
    tile("Iterations", short(iterations), asked),
    tile("Wall time", seconds(headline.wall_s), iterations ? `${seconds(headline.wall_s / iterations)} an iteration` : "no iteration yet"),
    tile("Tokens per second", short(headline.tokens_per_s), "generated, mean"),
    tile("Rollout waited", percent(headline.exposed_share), "for new weights"),
  ];
  if (known(headline.driver_share)) all.push(tile("Driver's CPU", percent(headline.driver_share), "of a core's time"));
  if (known(info.peak_memory_bytes)) all.push(tile("Peak memory", bytes(info.peak_memory_bytes), "all processes"));
  return h("div", { class: "tiles" }, all);
}

function comparison(runs) {
  const heads = ["run", "final success", "best", "reward", "iterations", "step", "wall time", "staleness", "tokens/s", "waited", "driver"];
  const cells = (run) => {
    const { headline, iterations } = run;
    return [
      fixed(headline.final_success),
      fixed(headline.best_success),
      short(lastKnown(column(run, "reward/mean"))),
      short(iterations),
      seconds(headline.step_s),
      seconds(headline.wall_s),
      short(mean(column(run, "staleness/mean"))),
      short(headline.tokens_per_s),
      percent(headline.exposed_share),
      percent(headline.driver_share),
    ];
  };
  const row = (run, r) =>
    h(
      "tr",
      {},
      h("th", {}, swatch(RUN_COLOURS[r % RUN_COLOURS.length]), run.label, run.info.status === "finished" ? null : h("span", { class: "soft" }, ` ${run.info.status}`)),
      cells(run).map((text) => h("td", { class: "number" }, text)),
    );
  return h(
    "div",
    {},
    h("h1", {}, `${runs.length} runs compared`),
    h("p", { class: "soft" }, "Success is on held-out tasks; reward, of the last batch; step, the mean iteration; waited, what rollout stood still for new weights; driver, its CPU as a share of a core."),
    h(
      "div",
      { class: "card", style: "margin-top:20px" },
      h("div", { class: "scroll", style: "margin-top:0" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { class: i ? "number" : "" }, text)))), h("tbody", {}, runs.map(row)))),
    ),
  );
}

function absent(runs) {
  const notes = runs
    .filter((run) => run.missing.length)
    .map((run) => `${runs.length > 1 ? `${run.label}: ` : ""}${run.missing.join(", ")}`);
  return notes.length ? h("p", { class: "notice" }, `Not in the run folder: ${notes.join("; ")}.`) : null;
}

function build(report) {
  const { runs } = report;
  const single = runs.length === 1;
  document.getElementById("report").replaceChildren(
    ...[
      single ? header(runs[0]) : comparison(runs),
      absent(runs),
      single ? tiles(runs[0]) : null,
      learning(runs),
      byTask(runs),
      time(runs),
      single ? timelineSection(runs[0]) : null,
      freshness(runs),
      ledger(runs),
      signals(runs),
      configuration(report),
      h("footer", {}, "Made by RollArt from metrics.jsonl, trace.json, config.yaml and run.json. The trace opens in Perfetto."),
    ].filter((part) => part !== null),
  );
  document.body.append(tip);
}

build(JSON.parse(document.getElementById("data").textContent));
