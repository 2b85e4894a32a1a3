// Runs a parsed template over its variables. One Evaluator serves one rendering.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/ast.h"
#include "engine/tokenizer/jinja/context.h"

namespace qwend::jinja {

// Variables of one level; inner levels see outer ones and never assign to them.
struct Scope {
  absl::flat_hash_map<std::string_view, Value> variables;  // names belong to the tree
  std::shared_ptr<Scope> parent;
};

class Evaluator {
 public:
  // `body` and the names of `variables` must outlive the evaluator.
  Evaluator(Context& context, absl::flat_hash_map<std::string_view, Value> variables);
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;
  absl::StatusOr<std::string> Run(const Body& body);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class Macro;
  class ScopeGuard;

  absl::StatusOr<Value> Eval(const Expr& expr);
  // A slice's bound or the like: none when not given.
  absl::StatusOr<Value> EvalOptional(const ExprPtr& expr);
  absl::StatusOr<std::vector<Value>> EvalAll(const std::vector<ExprPtr>& items);
  absl::StatusOr<Arguments> EvalArguments(const CallArguments& arguments);
  absl::StatusOr<Value> CallValue(const Value& callee, const Arguments& arguments);

  absl::StatusOr<Value> EvalNode(const Literal& node, int line);
  absl::StatusOr<Value> EvalNode(const Name& node, int line);
  absl::StatusOr<Value> EvalNode(const Captured& node, int line);
  absl::StatusOr<Value> EvalNode(const ListDisplay& node, int line);
  absl::StatusOr<Value> EvalNode(const DictDisplay& node, int line);
  absl::StatusOr<Value> EvalNode(const Unary& node, int line);
  absl::StatusOr<Value> EvalNode(const Binary& node, int line);
  absl::StatusOr<Value> EvalNode(const Logical& node, int line);
  absl::StatusOr<Value> EvalNode(const Comparison& node, int line);
  absl::StatusOr<Value> EvalNode(const Concat& node, int line);
  absl::StatusOr<Value> EvalNode(const Conditional& node, int line);
  absl::StatusOr<Value> EvalNode(const Attribute& node, int line);
  absl::StatusOr<Value> EvalNode(const Item& node, int line);
  absl::StatusOr<Value> EvalNode(const SliceItem& node, int line);
  absl::StatusOr<Value> EvalNode(const Call& node, int line);
  absl::StatusOr<Value> EvalNode(const BuiltinCall& node, int line);

  absl::StatusOr<Flow> ExecBody(const Body& body);
  // The text that a body writes, in a scope of its own; `flow` is how it ended.
  absl::StatusOr<Value> Capture(const Body& body, Flow& flow);
  // The value of `expr` over a captured text.
  absl::StatusOr<Value> EvalOverText(const Expr& expr, Value text);

  absl::StatusOr<Flow> Exec(const Data& node);
  absl::StatusOr<Flow> Exec(const Output& node);
  absl::StatusOr<Flow> Exec(const If& node);
  absl::StatusOr<Flow> Exec(const For& node);
  absl::StatusOr<Flow> Exec(const Set& node);
  absl::StatusOr<Flow> Exec(const SetBlock& node);
  absl::StatusOr<Flow> Exec(const FilterBlock& node);
  absl::StatusOr<Flow> Exec(const MacroDefinition& node);
  absl::StatusOr<Flow> Exec(const CallBlock& node);
  absl::StatusOr<Flow> Exec(const With& node);
  absl::StatusOr<Flow> Exec(const Jump& node);

  absl::StatusOr<std::shared_ptr<LoopState>> PrepareLoop(const For& node);
  absl::Status Assign(const Target& target, Value value);
  absl::Status Unpack(const Target& target, const Value& value);
  absl::Status Emit(std::string_view text);
  absl::StatusOr<Value> NewMacro(const MacroDefinition& definition);
  absl::StatusOr<Value> CallMacro(const Macro& macro, const Arguments& arguments);
  absl::Status BindMacroArguments(const MacroDefinition& definition, const Arguments& arguments);

  Context& context_;
  std::shared_ptr<Scope> scope_;
  std::string* output_ = nullptr;
  Value captured_;
  std::vector<std::unique_ptr<Macro>> macros_;  // values refer to them without owning them
};

}  // namespace qwend::jinja
