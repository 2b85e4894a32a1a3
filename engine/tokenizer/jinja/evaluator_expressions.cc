#include <utility>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/evaluator.h"
#include "engine/tokenizer/jinja/macro.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {

absl::StatusOr<Value> Evaluator::Eval(const Expr& expr) {
  const Context::Level level(context_);
  absl::Status bounds = level.Check();
  if (bounds.ok()) bounds = context_.Spend(1);
  absl::StatusOr<Value> result =
      bounds.ok()
          ? std::visit([&](const auto& node) { return EvalNode(node, expr.line); }, expr.node)
          : absl::StatusOr<Value>(std::move(bounds));
  if (!result.ok()) context_.NoteErrorLine(expr.line);
  return result;
}

absl::StatusOr<Value> Evaluator::EvalOptional(const ExprPtr& expr) {
  if (expr == nullptr) return Value();
  return Eval(*expr);
}

absl::StatusOr<std::vector<Value>> Evaluator::EvalAll(const std::vector<ExprPtr>& items) {
  std::vector<Value> values;
  values.reserve(items.size());
  for (const ExprPtr& item : items) {
    JINJA_ASSIGN(Value value, Eval(*item));
    values.push_back(std::move(value));
  }
  return values;
}

absl::StatusOr<Arguments> Evaluator::EvalArguments(const CallArguments& arguments) {
  Arguments values;
  JINJA_ASSIGN(values.positional, EvalAll(arguments.positional));
  for (const auto& [name, expr] : arguments.named) {
    JINJA_ASSIGN(Value value, Eval(*expr));
    values.named.emplace_back(name, std::move(value));
  }
  if (arguments.splat != nullptr) {
    JINJA_ASSIGN(const Value rest, Eval(*arguments.splat));
    JINJA_ASSIGN(std::vector<Value> items, Iterate(context_, rest));
    for (Value& item : items) values.positional.push_back(std::move(item));
  }
  if (arguments.named_splat != nullptr) {
    JINJA_ASSIGN(const Value rest, Eval(*arguments.named_splat));
    if (rest.dict() == nullptr) return Error("argument after ** must be a mapping");
    for (const auto& [key, value] : rest.dict()->entries) {
      if (!key.is_string()) return Error("keywords must be strings");
      values.named.emplace_back(key.text(), value);
    }
  }
  return values;
}

absl::StatusOr<Value> Evaluator::CallValue(const Value& callee, const Arguments& arguments) {
  JINJA_CHECK(RequireDefined(callee));
  const Callable* callable = callee.callable();
  if (callable == nullptr) return Error("'", callee.TypeName(), "' object is not callable");
  return callable->Call(context_, arguments);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Literal& node, int) { return node.value; }

absl::StatusOr<Value> Evaluator::EvalNode(const Name& node, int) {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
    const auto found = scope->variables.find(node.name);
    if (found != scope->variables.end()) return found->second;
  }
  if (const Value* global = FindGlobal(node.name)) return *global;
  return Value(Undefined{Undefined::Kind::kName, node.name, ""});
}

absl::StatusOr<Value> Evaluator::EvalNode(const Captured&, int) { return captured_; }

absl::StatusOr<Value> Evaluator::EvalNode(const ListDisplay& node, int) {
  JINJA_ASSIGN(std::vector<Value> items, EvalAll(node.items));
  return context_.NewSequence(std::move(items), node.kind);
}

absl::StatusOr<Value> Evaluator::EvalNode(const DictDisplay& node, int) {
  Dict dict;
  for (const auto& [key_expr, value_expr] : node.entries) {
    JINJA_ASSIGN(const Value key, Eval(*key_expr));
    JINJA_ASSIGN(Value value, Eval(*value_expr));
    JINJA_CHECK(RequireHashable(key));
    JINJA_CHECK(context_.Spend(static_cast<int64_t>(dict.entries.size() - dict.index.size())));
    dict.Set(key, std::move(value));
  }
  return context_.NewDict(std::move(dict));
}

absl::StatusOr<Value> Evaluator::EvalNode(const Unary& node, int) {
  JINJA_ASSIGN(const Value operand, Eval(*node.operand));
  if (node.op == Unary::Op::kNot) return Value(!operand.Truthy());
  return node.op == Unary::Op::kMinus ? Negate(operand) : Plus(operand);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Binary& node, int) {
  JINJA_ASSIGN(const Value left, Eval(*node.left));
  JINJA_ASSIGN(const Value right, Eval(*node.right));
  return Apply(context_, node.op, left, right);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Logical& node, int) {
  JINJA_ASSIGN(Value left, Eval(*node.left));
  if (left.Truthy() != node.is_and) return left;
  return Eval(*node.right);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Comparison& node, int) {
  JINJA_ASSIGN(Value left, Eval(*node.first));
  for (const auto& [op, expr] : node.rest) {
    JINJA_ASSIGN(Value right, Eval(*expr));
    JINJA_ASSIGN(const bool holds, Compare(context_, op, left, right));
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Concat& node, int) {
  std::string text;
  for (const ExprPtr& part : node.parts) {
    JINJA_ASSIGN(const Value value, Eval(*part));
    JINJA_ASSIGN(const std::string printed, ToText(context_, value));
    text += printed;
    if (static_cast<int64_t>(text.size()) > kMaxOutputBytes) return TooLong();
  }
  return context_.NewText(std::move(text));
}

absl::StatusOr<Value> Evaluator::EvalNode(const Conditional& node, int line) {
  JINJA_ASSIGN(const Value condition, Eval(*node.condition));
  if (condition.Truthy()) return Eval(*node.then);
  if (node.otherwise != nullptr) return Eval(*node.otherwise);
  return Value(Undefined{Undefined::Kind::kHint,
                         Cat("the inline if-expression on line ", line,
                             " evaluated to false and no else section was defined."),
                         ""});
}

absl::StatusOr<Value> Evaluator::EvalNode(const Attribute& node, int) {
  JINJA_ASSIGN(const Value object, Eval(*node.object));
  return GetAttribute(context_, object, node.name);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Item& node, int) {
  JINJA_ASSIGN(const Value object, Eval(*node.object));
  JINJA_ASSIGN(const Value key, Eval(*node.key));
  return GetItem(context_, object, key);
}

absl::StatusOr<Value> Evaluator::EvalNode(const SliceItem& node, int) {
  JINJA_ASSIGN(const Value object, Eval(*node.object));
  JINJA_ASSIGN(const Value start, EvalOptional(node.start));
  JINJA_ASSIGN(const Value stop, EvalOptional(node.stop));
  JINJA_ASSIGN(const Value step, EvalOptional(node.step));
  return GetSlice(context_, object, start, stop, step);
}

absl::StatusOr<Value> Evaluator::EvalNode(const Call& node, int) {
  JINJA_ASSIGN(const Value callee, Eval(*node.callee));
  JINJA_ASSIGN(const Arguments arguments, EvalArguments(node.arguments));
  return CallValue(callee, arguments);
}

absl::StatusOr<Value> Evaluator::EvalNode(const BuiltinCall& node, int) {
  JINJA_ASSIGN(const Value input, Eval(*node.input));
  JINJA_ASSIGN(const Arguments arguments, EvalArguments(node.arguments));
  return node.function(context_, input, arguments);
}

}  // namespace qwend::jinja
