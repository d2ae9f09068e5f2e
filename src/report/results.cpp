#include <headroom/report/results.h>

#include "report/json.h"

namespace headroom {

Json to_json(const TrainResults& results) {
  Json json = Json::object();
  json.set("train_runtime", results.train_runtime)
      .set("train_samples_per_second", results.train_samples_per_second)
      .set("train_steps_per_second", results.train_steps_per_second)
      .set("train_loss", results.train_loss)
      .set("final_loss", results.final_loss)
      .set("epoch", results.epoch)
      .set("global_step", results.global_step);
  if (results.eval) json.set("eval_loss", results.eval->loss);
  if (results.eval && results.eval->accuracy) json.set("eval_accuracy", *results.eval->accuracy);
  if (results.eval && results.eval->f1) json.set("eval_f1", *results.eval->f1);
  if (results.eval && results.eval->perplexity)
    json.set("eval_perplexity", *results.eval->perplexity);
  if (results.best_metric) json.set("best_metric", *results.best_metric);
  Json owners = Json::object();
  for (const auto& [owner, bytes] : results.peak_bytes_by_owner) owners.set(owner, bytes);
  json.set("peak_memory_bytes", results.peak_memory_bytes)
      .set("peak_activation_bytes", results.peak_activation_bytes)
      .set("peak_rss_bytes", results.peak_rss_bytes)
      .set("memory_budget_bytes", results.memory_budget_bytes)
      .set("predicted_peak_bytes", results.predicted_peak_bytes)
      .set("predicted_step_seconds", results.predicted_step_seconds)
      .set("measured_step_seconds", results.measured_step_seconds)
      .set("micro_batch_size", results.micro_batch_size)
      .set("gradient_accumulation_steps", results.gradient_accumulation_steps)
      .set("world_size", results.world_size)
      .set("recomputed_forward_fraction", results.recomputed_forward_fraction)
      .set("peak_bytes_by_owner", owners)
      .set("num_skipped_updates", results.num_skipped_updates)
      .set("num_recoveries", results.num_recoveries)
      .set("num_plans", results.num_plans)
      .set("data_wait_fraction", results.data_wait_fraction)
      .set("num_parameters", results.num_parameters)
      .set("weights_sha256", results.weights_sha256);
  if (!results.model_sha256.empty()) json.set("model_sha256", results.model_sha256);
  return json;
}

}  // namespace headroom
