// The sections of the report. Each takes the runs and returns an element; with one run they show its parts,
// with several they lay them over each other.
"use strict";

const RUN_COLOURS = ["blue", "orange", "green", "purple", "red", "teal", "gold", "pink", "brown", "grey"].map((c) => `var(--${c})`);
// A part of the step keeps the colour of the resource that it waits for, here and in the timeline.
const PART_COLOURS = new Map([
  ["get_batch", "var(--blue)"],
  ["wait_weights", "var(--purple)"],
  ["suspend", "var(--gold)"],
  ["update", "var(--red)"],
  ["resume", "var(--teal)"],
  ["recompute", "var(--brown)"],
  ["train", "var(--orange)"],
  ["train_step", "var(--orange)"],
  ["eval", "var(--green)"],
  ["probe", "var(--pink)"],
  ["checkpoint", "var(--brown)"],
  ["other", "var(--grey)"],
]);
const FATE_COLOURS = new Map([
  ["delivered", "var(--green)"],
  ["running", "var(--blue)"],
  ["buffered", "var(--teal)"],
  ["surplus", "var(--purple)"],
  ["stale", "var(--gold)"],
  ["filtered", "var(--brown)"],
  ["failed", "var(--red)"],
  ["cancelled", "var(--grey)"],
]);
const FATES = new Map([
  ["running", "being played now"],
  ["buffered", "finished, waiting for a batch"],
  ["delivered", "trained on"],
  ["surplus", "its group was complete without it"],
  ["stale", "past the staleness bound"],
  ["filtered", "its group had nothing to teach"],
  ["failed", "could not be finished"],
  ["cancelled", "ended by its owner"],
]);

function partColour(name) {
  return PART_COLOURS.get(name) ?? "var(--brown)";
}

function column(run, name) {
  return run.columns.find((one) => one.name === name)?.values ?? [];
}

function lastKnown(values) {
  return values.findLast(known) ?? null;
}

function card(title, note, ...content) {
  return h("section", { class: "card" }, h("h3", {}, title), note ? h("p", {}, note) : null, content);
}

function cards(kind, ...content) {
  return h("div", { class: `cards ${kind}` }, content);
}

// The horizontal axis of curves: iterations, or run time.
const BY_STEP = { name: "iteration", label: "iteration", format: short, whole: true, of: (run) => column(run, "step") };
const BY_TIME = { name: "after", label: "run time", format: duration, whole: false, of: (run) => column(run, "time") };

// One metric of every run. `series` lists the metrics when there is one run and several lines to tell apart.
function curves(runs, { title, note, y, names, x = BY_STEP, rules = [], missing, height }) {
  const several = runs.length > 1;
  const series = runs.flatMap((run, r) =>
    names.map(({ name, label, colour, faint }) => {
      const values = column(run, name);
      return {
        label: several ? run.label : label,
        colour: several ? RUN_COLOURS[r % RUN_COLOURS.length] : colour,
        faint,
        points: x.of(run).map((at, i) => [at, values[i]]),
      };
    }),
  );
  const shown = series.filter((one) => one.points.some(([, value]) => known(value)));
  if (!shown.length) return card(title, note, empty(missing));
  const chart = lineChart({ label: title, x, y, series: shown, rules, height });
  return card(title, note, shown.length > 1 && !height ? legend(shown) : null, chart);
}

// Learning ----------------------------------------------------------------------------------------

function learning(runs) {
  const body = h("div");
  const show = (x) => body.replaceChildren(cards("two", successCard(runs, x), rewardCard(runs, x)));
  show(BY_STEP);
  return section("Learning", choice([["By iteration", BY_STEP], ["By run time", BY_TIME]], show), body);
}

function successNote(runs) {
  if (runs.length > 1) return "Success rate on held-out tasks, each run.";
  const found = runs[0].evaluations;
  if (!found.length) return null;
  const { final_success: last, best_success: best, best_step: step } = runs[0].headline;
  const first = found[0].step < (column(runs[0], "step")[0] ?? 1) ? "before training" : `after iteration ${found[0].step}`;
  if (found.length === 1) return `${fixed(found[0].success)} ${first}; one evaluation so far.`;
  return `From ${fixed(found[0].success)} ${first} to ${fixed(last)}; best ${fixed(best)} after iteration ${step}.`;
}

function successCard(runs, x) {
  const several = runs.length > 1;
  const at = (run, one) => (x === BY_STEP ? one.step : one.time);
  const series = runs.map((run, r) => ({
    label: several ? run.label : "held-out tasks",
    colour: several ? RUN_COLOURS[r % RUN_COLOURS.length] : "var(--green)",
    points: run.evaluations.map((one) => [at(run, one), one.success]),
    dots: true,
  }));
  if (!several) {
    const values = column(runs[0], "success/mean");
    const points = x.of(runs[0]).map((where, i) => [where, values[i]]);
    series.unshift({ label: "training batch", colour: "var(--grey)", faint: true, points });
  }
  const shown = series.filter((one) => one.points.some(([, value]) => known(value)));
  const title = "Success rate";
  if (!shown.length) return card(title, null, empty("No evaluation yet: eval/success has not been logged."));
  const y = { label: "success rate", format: (v) => fixed(v, 2), min: 0, max: 1 };
  return card(title, successNote(runs), legend(shown), lineChart({ label: title, x, y, series: shown }));
}

function rewardCard(runs, x) {
  return curves(runs, {
    title: "Reward",
    note: "Mean reward of the batch of each iteration.",
    x,
    y: { label: "reward", format: short },
    names: [{ name: "reward/mean", label: "reward", colour: "var(--blue)" }],
    missing: "No iteration has finished yet.",
  });
}

// A mixture: what each task came to, over the run and at its end.
function byTask(runs) {
  const names = [...new Set(runs.flatMap((run) => run.tasks))];
  if (!names.length) return null;
  const points = (run, name) => column(run, name).map((value, i) => [column(run, "step")[i], value]).filter((point) => known(point[1]));
  const chart = (title, note, series, y) => {
    const shown = series.filter((one) => one.points.length);
    return shown.length ? card(title, note, legend(shown), lineChart({ label: title, x: BY_STEP, y, series: shown })) : null;
  };
  const colour = (i) => RUN_COLOURS[i % RUN_COLOURS.length];
  const rate = { label: "success rate", format: (v) => fixed(v, 2), min: 0, max: 1 };
  const success = (run, name) => points(run, `eval/success/${name}`);
  const charts =
    runs.length > 1
      ? names.map((name) => chart(name, "Success rate on held-out tasks, each run.", runs.map((run, r) => ({ label: run.label, colour: colour(r), dots: true, points: success(run, name) })), rate))
      : [
          chart("Success rate by task", "On held-out tasks.", names.map((name, n) => ({ label: name, colour: colour(n), dots: true, points: success(runs[0], name) })), rate),
          chart("Reward by task", "Mean of the batch of each iteration.", names.map((name, n) => ({ label: name, colour: colour(n), points: points(runs[0], `reward/mean/${name}`) })), { label: "reward", format: short }),
        ];
  const last = (run, name) => [fixed(lastKnown(column(run, `eval/success/${name}`))), short(lastKnown(column(run, `reward/mean/${name}`)))];
  const heads = runs.flatMap((run) => (runs.length > 1 ? [`${run.label}: success`, "reward"] : ["success", "reward"]));
  const rows = names.map((name) => h("tr", {}, h("th", {}, name), runs.flatMap((run) => last(run, name)).map((text) => h("td", { class: "number" }, text))));
  const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "task"), heads.map((text) => h("th", { class: "number" }, text)))), h("tbody", {}, rows));
  const drawn = charts.filter((one) => one !== null);
  return section("Task by task", cards(drawn.length % 3 ? "two" : "three", drawn), card("At the end", "Success of the last evaluation, reward of the last batch.", h("div", { class: "scroll" }, table)));
}

// Time --------------------------------------------------------------------------------------------

function time(runs) {
  return section("Where the time goes", null, runs.length > 1 ? partsOfSeveral(runs) : partsOfOne(runs[0]), speed(runs));
}

function partsOfOne(run) {
  const title = "Step time by part";
  if (!run.iterations) return card(title, null, empty("No iteration has finished yet."));
  const parts = run.parts.map(({ name, values }) => ({ label: name, colour: partColour(name), values }));
  const total = sum(parts.map((part) => sum(part.values)));
  const items = parts.map((part) => ({ ...part, value: percent(sum(part.values) / (total || 1)) }));
  const note = `The parts of an iteration sum to its wall time: ${seconds(total)} in ${plural(run.iterations, "iteration")}, ${seconds(total / run.iterations)} each on average.`;
  return card(title, note, legend(items), stackChart({ label: title, steps: column(run, "step"), parts }));
}

function partsOfSeveral(runs) {
  const names = [...new Set(runs.flatMap((run) => run.parts.map((part) => part.name)))];
  const rows = runs.map((run) => {
    const items = run.parts.map((part) => ({ label: part.name, colour: partColour(part.name), value: sum(part.values) / run.iterations }));
    return { run, items, total: sum(items.map((item) => item.value)) };
  });
  const longest = highest(rows.map((row) => row.total), 0) || 1;
  return card(
    "Step time by part",
    "Mean iteration of each run; the length of a bar is its wall time.",
    legend(names.map((name) => ({ label: name, colour: partColour(name) }))),
    h(
      "div",
      { class: "shares" },
      rows.map(({ run, items, total }) => {
        const bar = shareBar(items, seconds);
        bar.style.width = `${(100 * total) / longest}%`;
        return h("div", { class: "row" }, h("span", {}, run.label, " ", h("span", { class: "soft" }, total ? seconds(total) : "no iteration yet")), bar);
      }),
    ),
  );
}

function speed(runs) {
  const single = runs.length === 1 ? runs[0] : null;
  const tokens = curves(runs, {
    title: "Generation speed",
    note: single && single.iterations ? `${short(single.headline.tokens_per_s)} tokens per second on average.` : null,
    y: { label: "tokens per second", format: short, min: 0 },
    names: [{ name: "tokens_per_s", label: "tokens/s", colour: "var(--blue)" }],
    missing: "No iteration has finished yet.",
  });
  return [cards("two", tokens, weightsCard(runs)), runs.length > 1 ? weightsTable(runs) : null];
}

function weightsCard(runs) {
  const exposed = { name: "pull_exposed_s", label: "exposed pull (rollout waited)", colour: "var(--red)" };
  const all = [
    { name: "push_s", label: "push", colour: "var(--purple)" },
    { name: "pull_accumulated_s", label: "accumulated pull (in the background)", colour: "var(--teal)" },
    exposed,
  ];
  const note = (run) => {
    if (!run.iterations) return "Trainer to store (push), store to workers (pull).";
    const [push, pull, wait] = all.map(({ name }) => seconds(median(column(run, name))));
    return `Trainer to store (push), store to workers (pull). Median: push ${push}, accumulated pull ${pull}, exposed ${wait}.${published(run)}`;
  };
  return curves(runs, {
    title: runs.length > 1 ? "Exposed pull" : "Weight transfer",
    note: runs.length > 1 ? "What rollout waited for new weights, each run." : note(runs[0]),
    y: { label: "seconds", format: seconds, min: 0 },
    names: runs.length > 1 ? [exposed] : all,
    missing: "No weights have been transferred yet.",
  });
}

// What a version weighs, and how evenly the trainer's ranks publish it.
function published(run) {
  const total = lastKnown(column(run, "push_bytes"));
  if (!known(total)) return "";
  const ranks = run.columns.filter((one) => one.name.startsWith("push_bytes/")).map((one) => lastKnown(one.values) ?? 0);
  const share = ranks.length > 1 ? `, from ${ranks.length} ranks, at most ${percent(highest(ranks, 0) / total)} from one` : "";
  return ` A version is ${bytes(total)}${share}.`;
}

function weightsTable(runs) {
  const heads = ["run", "version", "push", "accumulated pull", "exposed pull"];
  const cells = (run) => [bytes(lastKnown(column(run, "push_bytes"))), ...["push_s", "pull_accumulated_s", "pull_exposed_s"].map((name) => seconds(median(column(run, name))))];
  const rows = runs.map((run, r) => h("tr", {}, h("th", {}, swatch(RUN_COLOURS[r % RUN_COLOURS.length]), run.label), cells(run).map((text) => h("td", { class: "number" }, text))));
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { class: i ? "number" : "" }, text)))), h("tbody", {}, rows));
  return card("The weights' way", "Size of a version, and medians: trainer to store, store to workers in the background, what rollout waited.", h("div", { class: "scroll" }, table));
}

function timelineSection(run) {
  const lead = "What each resource did during one iteration. Point at a bar, or tap it, for details; the percentage is the time the resource was busy.";
  if (!run.windows.length) {
    const why = run.missing.includes("trace.json") ? "there is no trace.json in the run folder." : "the trace holds no finished iteration.";
    return section("One iteration, resource by resource", null, card("Timeline", null, empty(`No timeline: ${why}`)));
  }
  const body = h("div");
  const show = (shown) => {
    const dropped = shown.dropped ? ` The trace left out ${short(shown.dropped)} spans of this iteration.` : "";
    const note = `Iteration ${shown.step} took ${seconds(shown.length)}.${dropped}`;
    const kinds = new Set(shown.rows.filter((row) => row.kind === "controller").flatMap((row) => row.bars.map((bar) => bar.name)));
    body.replaceChildren(
      card("Timeline", note, timeline(shown, partColour), h("p", { class: "soft" }, "The controller's row, by step:"), legend([...kinds].map((name) => ({ label: name, colour: partColour(name) })))),
    );
  };
  show(run.windows[0]);
  const buttons = choice(run.windows.map((one) => [`${one.why}: ${one.step}`, one]), show);
  return section("One iteration, resource by resource", h("p", { class: "lead" }, lead), buttons, body);
}

// Freshness ---------------------------------------------------------------------------------------

function freshness(runs) {
  const one = runs[0];
  const alphas = [...new Set(runs.map((run) => run.info.alpha).filter(known))];
  const rules = alphas.length === 1 ? [{ y: Math.ceil(alphas[0]), label: `bound ${Math.ceil(alphas[0])}` }] : [];
  const parity = [...new Set(runs.map((run) => run.info.parity_limit).filter(known))];
  const version = { name: "version", label: "weight version", format: short, whole: true, of: (run) => column(run, "version") };
  return section(
    "Freshness and correctness",
    null,
    cards(
      "two",
      runs.length > 1 ? null : histogramCard(one),
      curves(runs, {
        title: "Staleness over the run",
        note: "Versions between the first token of a trajectory and the moment it is handed to training.",
        y: { label: "versions", format: short, min: 0 },
        names: [
          { name: "staleness/max", label: "most in the batch", colour: "var(--orange)" },
          { name: "staleness/mean", label: "mean", colour: "var(--blue)" },
        ].slice(runs.length > 1 ? 1 : 0),
        rules,
        missing: "No batch has been handed out yet.",
      }),
      curves(runs, {
        title: "Engine against trainer",
        note: "Largest difference of log-probability for the same tokens, per weight version. It shows that the engine uses the weights that were trained.",
        x: version,
        y: { label: "max |Δ log p|, logarithmic", format: power, log: true },
        names: [{ name: "parity/max_abs", label: "max |Δ log p|", colour: "var(--pink)" }],
        rules: parity.length === 1 ? [{ y: parity[0], label: `limit ${power(parity[0])}` }] : [],
        missing: "No parity probe has run yet.",
      }),
      curves(runs, {
        title: "Off-policy work",
        note: `How many versions old trajectories are, on average, ${runs.length > 1 ? "while they are generated." : "while they are generated and while they wait in the queue."}`,
        y: { label: "versions", format: short, min: 0 },
        names: [
          { name: "off_policy/in_flight", label: "in flight", colour: "var(--blue)" },
          { name: "off_policy/in_queue", label: "in queue", colour: "var(--gold)" },
        ].slice(0, runs.length > 1 ? 1 : 2),
        missing: "No iteration has finished yet.",
      }),
    ),
  );
}

function histogramCard(run) {
  const title = "Staleness of trained samples";
  const groups = [
    { label: "staleness", colour: "var(--blue)", counts: run.staleness },
    { label: "trainer lag", colour: "var(--orange)", counts: run.lag },
  ].filter((group) => group.counts.length);
  if (!groups.length) return card(title, null, empty("No histogram: staleness/hist/<n> has not been logged."));
  const note = "Staleness counts served versions, trainer lag the trainer's own; the second is one more in pipelined modes.";
  return card(title, note, legend(groups), barChart({ label: title, xLabel: "versions", groups }));
}

// Accounting --------------------------------------------------------------------------------------

function ledger(runs) {
  const written = runs.filter((run) => run.ledger.length);
  const lead = h("p", { class: "lead" }, "Every trajectory that was issued ends in exactly one column.");
  if (!written.length) return section("Ledger", lead, card("Trajectories", null, empty("No iteration has finished yet.")));
  return section("Ledger", lead, written.length > 1 ? card("Trajectories", null, ledgerTable(written)) : ledgerOfOne(written[0]));
}

function ledgerOfOne(run) {
  const [issued, fates] = balance(run);
  const items = fates.map(([name, value]) => ({ label: name, colour: FATE_COLOURS.get(name), value }));
  return card("Trajectories", null, shareBar(items, short), equation(run), h("div", { class: "scroll" }, ledgerTable([run], issued)));
}

function balance(run) {
  const issued = run.ledger.find(([name]) => name === "issued")[1];
  return [issued, run.ledger.filter(([name]) => name !== "issued")];
}

function equation(run) {
  const [issued, fates] = balance(run);
  const off = issued - sum(fates.map(([, n]) => n));
  const terms = fates.filter(([, n]) => n).map(([name, n]) => `${short(n)} ${name}`);
  return h(
    "p",
    { class: "equation" },
    `${short(issued)} issued = ${terms.join(" + ") || "0"} `,
    off === 0 ? h("span", { class: "good" }, "✓ balances") : h("span", { class: "bad" }, `✗ off by ${short(off)}`),
  );
}

function ledgerTable(runs, issued = null) {
  const heads = runs.length > 1 ? runs.map((run) => run.label) : ["trajectories", "share"];
  const row = (name) => {
    const counts = runs.map((run) => run.ledger.find(([column]) => column === name)[1]);
    const cells = issued === null ? counts.map(short) : [short(counts[0]), percent(counts[0] / (issued || 1))];
    const explained = issued !== null && FATES.has(name);
    const label = explained ? [swatch(FATE_COLOURS.get(name)), name, h("span", { class: "soft" }, ` ${FATES.get(name)}`)] : name;
    return h(
      "tr",
      {},
      h("th", {}, label),
      cells.map((text) => h("td", { class: "number" }, text)),
    );
  };
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, "fate"), heads.map((text) => h("th", { class: "number" }, text)))),
      h("tbody", {}, runs[0].ledger.map(([name]) => row(name))),
    ),
  );
}

// The rest ----------------------------------------------------------------------------------------

function signals(runs) {
  const names = [...new Set(runs.flatMap((run) => run.signals))];
  if (!names.length) return null;
  const charts = names.map((name) =>
    curves(runs, {
      title: name,
      y: { format: short },
      names: [{ name, label: name, colour: "var(--blue)" }],
      missing: "never a finite number",
      height: 130,
    }),
  );
  const box = h("div", { class: "small" }, cards("three", charts));
  return section("Everything else that was logged", null, box);
}

function configuration(report) {
  const [run] = report.runs;
  if (report.runs.length > 1) {
    const body = report.differences.length ? differencesTable(report) : empty("The runs have the same configuration.");
    return section("Configuration", null, card("What differs", null, body));
  }
  const body = run.config
    ? h("section", { class: "card" }, h("details", {}, h("summary", {}, "Resolved configuration"), h("pre", {}, run.config)))
    : card("Resolved configuration", null, empty("There is no config.yaml in the run folder."));
  return section("Configuration", null, body);
}

function differencesTable(report) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, "key"), report.runs.map((run) => h("th", {}, run.label)))),
      h("tbody", {}, report.differences.map(([key, values]) => h("tr", {}, h("th", {}, key), values.map((value) => h("td", {}, value))))),
    ),
  );
}

// Parts of the page -------------------------------------------------------------------------------

function section(title, ...content) {
  return h("section", {}, h("h2", {}, title), content);
}

// Buttons of which one is chosen. options: [[label, value]]
function choice(options, chosen) {
  if (options.length < 2) return null;
  const buttons = options.map(([label, value], i) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(i === 0),
        onclick: (event) => {
          for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
          chosen(value);
        },
      },
      label,
    ),
  );
  return h("div", { class: "choice", role: "group" }, buttons);
}
