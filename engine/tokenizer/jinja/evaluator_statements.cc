#include <optional>
#include <utility>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/evaluator.h"
#include "engine/tokenizer/jinja/macro.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {

Evaluator::Evaluator(Context& context, absl::flat_hash_map<std::string_view, Value> variables)
    : context_(context), scope_(std::make_shared<Scope>()) {
  scope_->variables = std::move(variables);
}

Evaluator::~Evaluator() = default;

absl::StatusOr<std::string> Evaluator::Run(const Body& body) {
  std::string text;
  output_ = &text;
  JINJA_CHECK(ExecBody(body).status());
  return text;
}

absl::Status Evaluator::Emit(std::string_view text) {
  JINJA_CHECK(context_.Allocate(static_cast<int64_t>(text.size())));
  if (static_cast<int64_t>(output_->size() + text.size()) > kMaxOutputBytes) {
    return Error("the rendered text is longer than ", kMaxOutputBytes >> 20, " MiB");
  }
  output_->append(text);
  return absl::OkStatus();
}

absl::StatusOr<Evaluator::Flow> Evaluator::ExecBody(const Body& body) {
  const Context::Level level(context_);
  JINJA_CHECK(level.Check());
  for (const auto& statement : body) {
    JINJA_CHECK(context_.Spend(1));
    absl::StatusOr<Flow> flow =
        std::visit([&](const auto& node) { return Exec(node); }, statement->node);
    if (!flow.ok()) {
      context_.NoteErrorLine(statement->line);
      return flow;
    }
    if (*flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

absl::StatusOr<Value> Evaluator::Capture(const Body& body, Flow& flow) {
  std::string text;
  std::string* const outer = std::exchange(output_, &text);
  const ScopeGuard scope(*this);
  absl::StatusOr<Flow> result = ExecBody(body);
  output_ = outer;
  JINJA_ASSIGN(flow, std::move(result));
  return context_.NewText(std::move(text));
}

absl::StatusOr<Value> Evaluator::EvalOverText(const Expr& expr, Value text) {
  Value outer = std::exchange(captured_, std::move(text));
  absl::StatusOr<Value> result = Eval(expr);
  captured_ = std::move(outer);
  return result;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const Data& node) {
  JINJA_CHECK(Emit(node.text));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const Output& node) {
  JINJA_ASSIGN(const Value value, Eval(*node.value));
  if (value.is_string()) {
    JINJA_CHECK(Emit(value.text()));
    return Flow::kNext;
  }
  JINJA_ASSIGN(const std::string text, ToText(context_, value));
  JINJA_CHECK(Emit(text));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const If& node) {
  for (const auto& [condition, body] : node.branches) {
    JINJA_ASSIGN(const Value value, Eval(*condition));
    if (value.Truthy()) return ExecBody(body);
  }
  return ExecBody(node.otherwise);
}

absl::StatusOr<std::shared_ptr<LoopState>> Evaluator::PrepareLoop(const For& node) {
  JINJA_ASSIGN(const Value iterable, Eval(*node.iterable));
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context_, iterable));
  if (node.condition != nullptr) {
    std::vector<Value> kept;
    for (Value& item : items) {
      const ScopeGuard scope(*this);
      JINJA_CHECK(Assign(node.target, item));
      JINJA_ASSIGN(const Value keep, Eval(*node.condition));
      if (keep.Truthy()) kept.push_back(std::move(item));
    }
    items = std::move(kept);
  }
  auto sequence = std::make_shared<Sequence>();
  for (const Value& item : items) sequence->depth = std::max(sequence->depth, item.Depth() + 1);
  if (sequence->depth >= kMaxValueDepth) {
    return Error("values are nested more than ", kMaxValueDepth, " levels deep");
  }
  sequence->items = std::move(items);
  auto loop = std::make_shared<LoopState>();
  loop->items = std::move(sequence);
  return loop;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const For& node) {
  JINJA_ASSIGN(const std::shared_ptr<LoopState> loop, PrepareLoop(node));
  const std::vector<Value>& items = loop->items->items;
  if (items.empty()) {
    const ScopeGuard scope(*this);
    return ExecBody(node.otherwise);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    JINJA_CHECK(context_.Spend(1));
    const ScopeGuard scope(*this);
    loop->index = i;
    scope_->variables["loop"] = Value(std::shared_ptr<const LoopState>(loop));
    JINJA_CHECK(Assign(node.target, items[i]));
    JINJA_ASSIGN(const Flow flow, ExecBody(node.body));
    if (flow == Flow::kBreak) break;
  }
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const Set& node) {
  JINJA_ASSIGN(Value value, Eval(*node.value));
  JINJA_CHECK(Assign(node.target, std::move(value)));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const SetBlock& node) {
  Flow flow = Flow::kNext;
  JINJA_ASSIGN(Value text, Capture(node.body, flow));
  if (flow != Flow::kNext) return flow;
  JINJA_ASSIGN(Value value, EvalOverText(*node.value, std::move(text)));
  JINJA_CHECK(Assign(node.target, std::move(value)));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const FilterBlock& node) {
  Flow flow = Flow::kNext;
  JINJA_ASSIGN(Value text, Capture(node.body, flow));
  if (flow != Flow::kNext) return flow;
  JINJA_ASSIGN(const Value value, EvalOverText(*node.value, std::move(text)));
  JINJA_ASSIGN(const std::string printed, ToText(context_, value));
  JINJA_CHECK(Emit(printed));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const MacroDefinition& node) {
  JINJA_ASSIGN(Value macro, NewMacro(node));
  scope_->variables[node.name] = std::move(macro);
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const CallBlock& node) {
  const Call& call = std::get<Call>(node.call->node);
  JINJA_ASSIGN(const Value callee, Eval(*call.callee));
  JINJA_ASSIGN(Arguments arguments, EvalArguments(call.arguments));
  JINJA_ASSIGN(Value caller, NewMacro(node.caller));
  arguments.named.emplace_back("caller", std::move(caller));
  JINJA_ASSIGN(const Value result, CallValue(callee, arguments));
  JINJA_ASSIGN(const std::string text, ToText(context_, result));
  JINJA_CHECK(Emit(text));
  return Flow::kNext;
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const With& node) {
  std::vector<Value> values;
  for (const auto& [target, expr] : node.bindings) {
    JINJA_ASSIGN(Value value, Eval(*expr));
    values.push_back(std::move(value));
  }
  const ScopeGuard scope(*this);
  for (size_t i = 0; i < values.size(); ++i) {
    JINJA_CHECK(Assign(node.bindings[i].first, std::move(values[i])));
  }
  return ExecBody(node.body);
}

absl::StatusOr<Evaluator::Flow> Evaluator::Exec(const Jump& node) {
  return node.is_break ? Flow::kBreak : Flow::kContinue;
}

absl::Status Evaluator::Assign(const Target& target, Value value) {
  if (target.name.empty()) return Unpack(target, value);
  if (target.attribute.empty()) {
    scope_->variables[target.name] = std::move(value);
    return absl::OkStatus();
  }
  JINJA_ASSIGN(const Value object, EvalNode(Name{target.name}, target.line));
  Namespace* const ns = object.name_space();
  if (ns == nullptr) return Error("cannot assign attribute on non-namespace object");
  JINJA_CHECK(context_.Allocate(static_cast<int64_t>(2 * sizeof(Value))));
  ns->attributes.Set(Value(target.attribute), std::move(value));
  return absl::OkStatus();
}

absl::Status Evaluator::Unpack(const Target& target, const Value& value) {
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context_, value));
  const size_t wanted = target.elements.size();
  if (items.size() > wanted) return Error("too many values to unpack (expected ", wanted, ")");
  if (items.size() < wanted) {
    return Error("not enough values to unpack (expected ", wanted, ", got ", items.size(), ")");
  }
  for (size_t i = 0; i < wanted; ++i) {
    JINJA_CHECK(Assign(target.elements[i], std::move(items[i])));
  }
  return absl::OkStatus();
}

absl::StatusOr<Value> Evaluator::NewMacro(const MacroDefinition& definition) {
  JINJA_CHECK(context_.Allocate(static_cast<int64_t>(sizeof(Macro) + sizeof(Scope))));
  macros_.push_back(std::make_unique<Macro>(*this, definition, scope_));
  return Value(std::shared_ptr<const Callable>(std::shared_ptr<void>(), macros_.back().get()));
}

absl::StatusOr<Value> Evaluator::CallMacro(const Macro& macro, const Arguments& arguments) {
  const Context::Level level(context_);
  JINJA_CHECK(level.Check());
  const ScopeGuard scope(*this, macro.scope());
  JINJA_CHECK(BindMacroArguments(macro.definition(), arguments));
  std::string text;
  std::string* const outer = std::exchange(output_, &text);
  Value captured = std::exchange(captured_, Value());
  absl::StatusOr<Flow> result = ExecBody(macro.definition().body);
  output_ = outer;
  captured_ = std::move(captured);
  JINJA_CHECK(result.status());
  return context_.NewText(std::move(text));
}

absl::Status Evaluator::BindMacroArguments(const MacroDefinition& definition,
                                           const Arguments& arguments) {
  std::vector<std::pair<std::string, Value>> named = arguments.named;
  const auto take = [&](std::string_view name) -> std::optional<Value> {
    for (auto it = named.begin(); it != named.end(); ++it) {
      if (it->first != name) continue;
      std::optional<Value> value = std::move(it->second);
      named.erase(it);
      return value;
    }
    return std::nullopt;
  };

  const size_t num_parameters = definition.parameters.size();
  for (size_t i = 0; i < num_parameters; ++i) {
    const MacroDefinition::Parameter& parameter = definition.parameters[i];
    std::optional<Value> value;
    if (i < arguments.positional.size()) {
      value = arguments.positional[i];
    } else {
      value = take(parameter.name);
    }
    if (!value.has_value() && parameter.otherwise != nullptr) {
      JINJA_ASSIGN(value, Eval(*parameter.otherwise));
    }
    scope_->variables[parameter.name] = value.value_or(
        Value(Undefined{Undefined::Kind::kHint,
                        Cat("parameter ", ReprText(parameter.name), " was not provided"), ""}));
  }
  if (definition.reads_caller && !scope_->variables.contains("caller")) {
    scope_->variables["caller"] =
        take("caller").value_or(Value(Undefined{Undefined::Kind::kHint, "No caller defined", ""}));
  }
  if (definition.reads_kwargs) {
    Dict rest;
    for (auto& [name, value] : named) rest.Set(Value(name), std::move(value));
    JINJA_ASSIGN(scope_->variables["kwargs"], context_.NewDict(std::move(rest)));
  } else if (!named.empty()) {
    return Error("macro ", ReprText(definition.name), " takes no keyword argument ",
                 ReprText(named.front().first));
  }
  const size_t num_extra =
      arguments.positional.size() - std::min(arguments.positional.size(), num_parameters);
  if (definition.reads_varargs) {
    std::vector<Value> rest(arguments.positional.end() - static_cast<ptrdiff_t>(num_extra),
                            arguments.positional.end());
    JINJA_ASSIGN(scope_->variables["varargs"],
                 context_.NewSequence(std::move(rest), Sequence::Kind::kTuple));
  } else if (num_extra > 0) {
    return Error("macro ", ReprText(definition.name), " takes not more than ", num_parameters,
                 " argument(s)");
  }
  return absl::OkStatus();
}

}  // namespace qwend::jinja
