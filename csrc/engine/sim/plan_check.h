#pragma once

#include <map>
#include <vector>

#include "engine/config.h"
#include "engine/sim/plan_rows.h"
#include "engine/sim/trip.h"
#include "engine/step_plan.h"

namespace airside::sim {

// Whether a plan keeps the rules that can be told before it is computed.
class PlanCheck {
 public:
  // `before`: the plan ahead of it in flight; null: none.
  PlanCheck(const EngineConfig& config, const std::map<SeqId, Trip>& live, const StepPlan& plan,
            const StepPlan* before);

  // Throws std::logic_error on the first rule that is broken.
  void Run() const;

  const std::vector<PlanRow>& rows() const { return rows_; }

 private:
  void CheckStep() const;
  void CheckMixture() const;
  void CheckImages() const;
  void CheckRow(const PlanRow& row) const;
  void CheckTokens(const PlanRow& row, const Trip& trip) const;
  void CheckPlaceholder(const PlanRow& row, TokenId token) const;
  void CheckSampling(const PlanRow& row, const Trip& trip) const;
  void CheckTail(const PlanRow& row, const Trip& trip) const;
  std::int32_t NumPending(const PlanRow& row) const;

  const EngineConfig& config_;
  const std::map<SeqId, Trip>& live_;
  const StepPlan& plan_;
  const StepPlan* before_;
  std::vector<PlanRow> rows_;
};

}  // namespace airside::sim
