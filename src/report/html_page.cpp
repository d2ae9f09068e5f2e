#include "report/html_page.h"

#include <headroom/core/bytes.h>
#include <headroom/core/version.h>
#include "core/figures.h"

#include "report/svg_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace headroom {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1c2330; --soft: #5d6878; --rule: #e0e4ea; --train: #2f6fde;
  --eval: #d9730d; --rate: #7a52c7; --limit: #c8283c; --good: #1d8a4e; --weights: #4e79a7; --optimizer: #9a6fb0; --gradients: #e39243;
  --inputs: #5fb0a8; --other: #9aa3ae; --activations: #7dbb63; }
@media (prefers-color-scheme: dark) { :root { --page: #12161d; --card: #1b212b; --ink: #e6eaf0; --soft: #97a3b4; --rule: #2e3744;
  --train: #6ea2ff; --eval: #f2a154; --rate: #b292f0; --limit: #ff6b7d; --good: #5ccb8c; --weights: #5f8fc4; --optimizer: #ac85c2;
  --gradients: #d98b3f; --inputs: #5fb0a8; --other: #7c8694; --activations: #6fae57; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); }
header p { margin: 4px 0 24px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; margin-bottom: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 14px; background: none; border: 0; padding: 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px; }
.card .name { color: var(--soft); font-size: 13px; }
.card .value { font-size: 24px; font-weight: 600; letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }
.card .note { color: var(--soft); font-size: 13px; }
.meter { height: 6px; border-radius: 3px; background: var(--rule); margin: 8px 0 4px; overflow: hidden; }
.meter div { height: 100%; border-radius: 3px; background: var(--good); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 8px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.legend i.dash { height: 0; border-top: 2px dashed; border-radius: 0; vertical-align: 4px; width: 14px; }
.legend i.mark { height: 0; border-top: 2px solid; border-radius: 0; vertical-align: 4px; width: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.right { text-align: right; white-space: nowrap; }
td .bar { display: block; height: 5px; border-radius: 2px; background: var(--activations); margin-top: 3px; margin-left: auto; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.settings { columns: 2; column-gap: 32px; } @media (max-width: 640px) { .settings { columns: 1; } }
.settings div { break-inside: avoid; display: flex; justify-content: space-between; gap: 16px; padding: 3px 0; }
.settings span { color: var(--soft); }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); }
footer { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.train { stroke: var(--train); } .eval { stroke: var(--eval); } .rate { stroke: var(--rate); } circle.eval { fill: var(--eval); }
.layer.weights { fill: var(--weights); } .layer.optimizer { fill: var(--optimizer); } .layer.gradients { fill: var(--gradients); }
.layer.inputs { fill: var(--inputs); } .layer.other { fill: var(--other); } .layer.activations { fill: var(--activations); }
.top { stroke: var(--ink); stroke-width: 1.6; fill: none; }
path.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 6 4; }
svg text.limit { fill: var(--limit); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.hit { fill: transparent; } .hit:hover { fill: var(--ink); fill-opacity: 0.08; }
)";

// Owners from the bottom of a stack up: what stays first, what comes and goes last.
constexpr std::array<const char*, 6> kOwners = {"weights", "optimizer", "gradients",
                                                "inputs",  "other",     "activations"};

std::string card(const std::string& name, const std::string& value, const std::string& note,
                 double share = -1) {
  std::string meter;
  if (share >= 0)
    meter = fmt::format("<div class=\"meter\"><div style=\"width:{:.1f}%\"></div></div>",
                        100 * std::min(share, 1.0));
  return fmt::format(
      "<div class=\"card\"><div class=\"name\">{}</div><div class=\"value\">{}</div>{}<div "
      "class=\"note\">{}</div></div>\n",
      escape_html(name), escape_html(value), meter, escape_html(note));
}

std::string duration(double seconds) {
  const bool has_minutes = seconds >= 120 && seconds < 1e12;
  if (!has_minutes) return format_figure(seconds) + " s";
  const auto whole = static_cast<std::int64_t>(seconds);
  return whole < 7200 ? fmt::format("{} min {:02} s", whole / 60, whole % 60)
                      : fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.2f} billion", count * 1e-9);
  if (count >= 1e6) return fmt::format("{:.1f} million", count * 1e-6);
  return fmt::format("{:.0f}", count);
}

// How far a measurement is from its prediction: "+3.1%".
std::string deviation(double measured, double predicted) {
  return fmt::format("{:+.1f}%", 100 * (measured / predicted - 1));
}

std::string headline(const TrainResults& r) {
  std::string cards = card("Loss", format_loss(r.final_loss),
                           "last global batch; " + format_loss(r.train_loss) + " in the mean");
  if (r.eval) {
    cards += r.eval->accuracy
                 ? card("Accuracy", fmt::format("{:.2f}%", 100 * *r.eval->accuracy),
                        "evaluation, loss " + format_loss(r.eval->loss))
                 : card("Evaluation loss", format_loss(r.eval->loss), "after the last update");
  }
  cards += card("Time", duration(r.train_runtime),
                format_figure(r.measured_step_seconds) + " s per update (median)");
  cards += card("Speed", format_figure(r.train_samples_per_second), "samples per second");
  const auto peak = static_cast<double>(r.peak_memory_bytes),
             budget = static_cast<double>(r.memory_budget_bytes);
  cards +=
      r.memory_budget_bytes > 0
          ? card("Peak memory", format_bytes(r.peak_memory_bytes),
                 fmt::format("{:.1f}% of the budget of {}", 100 * peak / budget,
                             format_bytes(r.memory_budget_bytes)),
                 peak / budget)
          : card("Peak memory", format_bytes(r.peak_memory_bytes),
                 fmt::format("activations {}; no budget", format_bytes(r.peak_activation_bytes)));
  if (r.predicted_peak_bytes > 0) {
    cards += card("Predicted peak", format_bytes(r.predicted_peak_bytes),
                  "measured " + deviation(peak, static_cast<double>(r.predicted_peak_bytes)));
  }
  if (r.predicted_step_seconds > 0) {
    cards += card("Predicted update", format_figure(r.predicted_step_seconds) + " s",
                  fmt::format("measured {} s, {}", format_figure(r.measured_step_seconds),
                              deviation(r.measured_step_seconds, r.predicted_step_seconds)));
  }
  if (r.num_skipped_updates > 0)
    cards += card("Skipped updates", std::to_string(r.num_skipped_updates),
                  "gradients that were not finite");
  if (r.num_recoveries > 0)
    cards += card("Recoveries", std::to_string(r.num_recoveries),
                  "steps that ran out of memory and were made again");
  return "<section class=\"cards\">\n" + cards + "</section>\n";
}

std::string legend_entry(const std::string& name, const std::string& colour,
                         const char* shape = "") {
  const char* property = *shape == '\0' ? "background" : "border-color";
  return fmt::format("<span><i class=\"{}\" style=\"{}:var(--{})\"></i>{}</span>", shape, property,
                     colour, escape_html(name));
}

std::string section(const std::string& title, const std::string& text, const std::string& content) {
  return fmt::format("<section>\n<h2>{}</h2>\n<p>{}</p>\n{}</section>\n", escape_html(title),
                     escape_html(text), content);
}

std::string curves(const RunRecord& run) {
  if (run.updates.empty())
    return section(
        "Loss",
        "No update was logged: --report_to none, or --logging_steps above the number of updates.",
        "");
  ChartLine train{"training loss", "train", {}, run.updates.size() == 1},
      rate{"learning rate", "rate", {}, run.updates.size() == 1};
  for (const RunRecord::Update& update : run.updates) {
    train.points.emplace_back(update.step, update.loss);
    rate.points.emplace_back(update.step, update.learning_rate);
  }
  ChartLine eval{"evaluation loss", "eval", {}, true};
  for (const RunRecord::Evaluation& evaluation : run.evaluations)
    eval.points.emplace_back(evaluation.step, evaluation.loss);
  std::vector<ChartLine> losses{train};
  std::string legend = legend_entry("training", "train");
  if (!eval.points.empty()) {
    losses.push_back(eval);
    legend += legend_entry("evaluation", "eval");
  }
  return section(
             "Loss", "Of the global batch, at each logged update.",
             "<div class=\"legend\">" + legend + "</div>\n" + line_chart(losses, "update", 320)) +
         section("Learning rate", "At each logged update.", line_chart({rate}, "update", 190));
}

std::string owner_table(const TrainResults& r) {
  std::string rows;
  for (const char* owner : kOwners) {
    const auto found = r.peak_bytes_by_owner.find(owner);
    if (found == r.peak_bytes_by_owner.end()) continue;
    rows += fmt::format("<tr><td>{}</td><td class=\"right\">{}</td></tr>\n", owner,
                        format_bytes(found->second));
  }
  return "<div class=\"scroll\"><table><tr><th>owner</th><th class=\"right\">its own "
         "peak</th></tr>\n" +
         rows + "</table></div>\n";
}

std::string memory(const RunRecord& run) {
  if (run.timeline.empty()) {
    return section("Memory",
                   "The most that each owner held. A run with --memory_budget or "
                   "--gradient_checkpointing also shows one step.",
                   owner_table(run.results));
  }
  StackedChart chart;
  std::string legend;
  for (const char* owner : kOwners) {
    ChartLayer layer{owner, owner, {}};
    double most = 0;
    for (const RunRecord::Moment& moment : run.timeline) {
      const auto found = moment.bytes_by_owner.find(owner);
      layer.bytes.push_back(
          found == moment.bytes_by_owner.end() ? 0.0 : static_cast<double>(found->second));
      most = std::max(most, layer.bytes.back());
    }
    if (most > 0) legend += legend_entry(owner, owner);
    chart.layers.push_back(std::move(layer));
  }
  for (const RunRecord::Moment& moment : run.timeline) {
    chart.columns.push_back(moment.operation);
    chart.tops.push_back(static_cast<double>(moment.peak_bytes));
  }
  chart.tops_name = "most within the operation";
  legend += legend_entry(chart.tops_name, "ink", "mark");
  if (run.results.memory_budget_bytes > 0) {
    chart.limit = static_cast<double>(run.results.memory_budget_bytes);
    chart.limit_name = "budget " + format_bytes(run.results.memory_budget_bytes);
    legend += legend_entry("budget", "limit", "dash");
  }
  return section("Memory of one step",
                 "Bytes by owner after each operation of one micro-batch of the first update, as "
                 "measured: forward up, backward down.",
                 "<div class=\"legend\">" + legend + "</div>\n" + stacked_chart(chart, 340) +
                     "<details><summary>Peaks by owner</summary>" + owner_table(run.results) +
                     "</details>\n");
}

bool same_decision(const RunRecord::Stage& a, const RunRecord::Stage& b) {
  return a.decision == b.decision && a.kept_bytes == b.kept_bytes &&
         a.extra_seconds == b.extra_seconds;
}

std::string paging_sentence(const RunRecord& run) {
  if (run.paged_bytes_read == 0) return "";
  return fmt::format(
      " Weights, gradients and optimizer state that do not fit are paged: an update reads {} and "
      "writes {}.",
      format_bytes(run.paged_bytes_read), format_bytes(run.paged_bytes_written));
}

std::string plan_table(const RunRecord& run) {
  if (run.stages.empty()) return "";
  std::int64_t most = 1;
  for (const RunRecord::Stage& stage : run.stages) most = std::max(most, stage.kept_bytes);
  std::string rows;
  double extra = 0;
  for (std::size_t first = 0; first < run.stages.size();) {
    // Equal neighbours share a row.
    const RunRecord::Stage& stage = run.stages[first];
    std::size_t end = first + 1;
    while (end < run.stages.size() && same_decision(stage, run.stages[end])) ++end;
    const std::size_t count = end - first;
    const std::string name =
        count == 1
            ? escape_html(stage.name)
            : fmt::format("{} … {} <span style=\"color:var(--soft)\">({} stages)</span>",
                          escape_html(stage.name), escape_html(run.stages[end - 1].name), count);
    rows += fmt::format(
        "<tr><td>{}</td><td>{}</td><td class=\"right\">{}<span class=\"bar\" "
        "style=\"width:{:.0f}px\"></span></td>"
        "<td class=\"right\">{} ms</td></tr>\n",
        name, escape_html(stage.decision), format_bytes(stage.kept_bytes),
        90.0 * static_cast<double>(stage.kept_bytes) / static_cast<double>(most),
        format_figure(1e3 * stage.extra_seconds));
    extra += static_cast<double>(count) * stage.extra_seconds;
    first = end;
  }
  return section(
      "Plan",
      fmt::format("Policy {}: what each stage keeps for backward, and what that costs against "
                  "keeping everything: {} ms per "
                  "micro-batch. {:.1f}% of forwards are made again.{}",
                  run.policy, format_figure(1e3 * extra),
                  100 * run.results.recomputed_forward_fraction, paging_sentence(run)),
      "<div class=\"scroll\"><table><tr><th>stage</th><th>decision</th><th "
      "class=\"right\">kept</th><th class=\"right\">extra "
      "time</th></tr>\n" +
          rows + "</table></div>\n");
}

std::string settings(const RunRecord& run) {
  std::string rows;
  for (const auto& [name, value] : run.settings) {
    rows += fmt::format("<div><span>{}</span><code>{}</code></div>\n", escape_html(name),
                        escape_html(value));
  }
  return rows.empty() ? ""
                      : section("Settings", "Those that differ from the defaults.",
                                "<div class=\"settings\">\n" + rows + "</div>\n");
}

}  // namespace

std::string to_html(const RunRecord& run) {
  const TrainResults& r = run.results;
  const std::string title = escape_html(run.name);
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{} - "
      "Headroom</title>\n"
      "<style>{}</style>\n</head>\n<body>\n<main>\n",
      title, kStyle);
  page += fmt::format(
      "<header><h1>{}</h1><p>{} parameters, {} updates ({:.2f} epochs), {} x {} samples per "
      "update{}</p></header>\n",
      title, count_text(static_cast<double>(r.num_parameters)), r.global_step, r.epoch,
      r.gradient_accumulation_steps, r.micro_batch_size,
      r.world_size > 1 ? fmt::format(" on each of {} ranks", r.world_size) : "");
  page += headline(r) + curves(run) + memory(run) + plan_table(run) + settings(run);
  page += fmt::format(
      "<footer>Made by headroom {}. Weights: <code>{}</code></footer>\n</main>\n</body>\n</html>\n",
      kVersion, escape_html(r.weights_sha256));
  return page;
}

}  // namespace headroom
