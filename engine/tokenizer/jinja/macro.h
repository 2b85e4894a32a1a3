// A macro, bound to the variables around its definition.
#pragma once

#include <memory>
#include <string>

#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/evaluator.h"
#include "engine/tokenizer/jinja/print.h"

namespace qwend::jinja {

class Evaluator::Macro : public Callable {
 public:
  Macro(Evaluator& evaluator, const MacroDefinition& definition, std::shared_ptr<Scope> scope)
      : evaluator_(evaluator), definition_(definition), scope_(std::move(scope)) {}
  absl::StatusOr<Value> Call(Context&, const Arguments& arguments) const override {
    return evaluator_.CallMacro(*this, arguments);
  }
  std::string Repr() const override { return Cat("<Macro ", ReprText(definition_.name), ">"); }
  std::string_view type_name() const override { return "Macro"; }
  const MacroDefinition& definition() const { return definition_; }
  const std::shared_ptr<Scope>& scope() const { return scope_; }

 private:
  Evaluator& evaluator_;
  const MacroDefinition& definition_;
  std::shared_ptr<Scope> scope_;
};

// Enters a new scope for as long as it lives.
class Evaluator::ScopeGuard {
 public:
  ScopeGuard(Evaluator& evaluator, std::shared_ptr<Scope> parent)
      : evaluator_(evaluator), outer_(evaluator.scope_) {
    evaluator.scope_ = std::make_shared<Scope>();
    evaluator.scope_->parent = std::move(parent);
  }
  explicit ScopeGuard(Evaluator& evaluator) : ScopeGuard(evaluator, evaluator.scope_) {}
  ~ScopeGuard() { evaluator_.scope_ = std::move(outer_); }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Evaluator& evaluator_;
  std::shared_ptr<Scope> outer_;
};

}  // namespace qwend::jinja
