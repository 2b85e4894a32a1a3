#include <algorithm>
#include <array>
#include <utility>

#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/parser.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

constexpr int kMaxHeight = 250;  // a long chain of operators is a high tree too

int HeightOf(const ExprPtr& expr) { return expr == nullptr ? 0 : expr->height; }

template <typename... Rest>
int HeightOf(const ExprPtr& first, const Rest&... rest) {
  return std::max(HeightOf(first), HeightOf(rest...));
}

int HeightOf(const std::vector<ExprPtr>& items) {
  int height = 0;
  for (const ExprPtr& item : items) height = std::max(height, HeightOf(item));
  return height;
}

int HeightOf(const CallArguments& arguments) {
  int height =
      std::max(HeightOf(arguments.positional), HeightOf(arguments.splat, arguments.named_splat));
  for (const auto& [name, value] : arguments.named) height = std::max(height, HeightOf(value));
  return height;
}

struct ChildHeight {
  int operator()(const Literal&) const { return 0; }
  int operator()(const Name&) const { return 0; }
  int operator()(const Captured&) const { return 0; }
  int operator()(const ListDisplay& node) const { return HeightOf(node.items); }
  int operator()(const DictDisplay& node) const {
    int height = 0;
    for (const auto& [key, value] : node.entries) height = std::max(height, HeightOf(key, value));
    return height;
  }
  int operator()(const Unary& node) const { return HeightOf(node.operand); }
  int operator()(const Binary& node) const { return HeightOf(node.left, node.right); }
  int operator()(const Logical& node) const { return HeightOf(node.left, node.right); }
  int operator()(const Comparison& node) const {
    int height = HeightOf(node.first);
    for (const auto& [op, operand] : node.rest) height = std::max(height, HeightOf(operand));
    return height;
  }
  int operator()(const Concat& node) const { return HeightOf(node.parts); }
  int operator()(const Conditional& node) const {
    return HeightOf(node.condition, node.then, node.otherwise);
  }
  int operator()(const Attribute& node) const { return HeightOf(node.object); }
  int operator()(const Item& node) const { return HeightOf(node.object, node.key); }
  int operator()(const SliceItem& node) const {
    return HeightOf(node.object, node.start, node.stop, node.step);
  }
  int operator()(const Call& node) const {
    return std::max(HeightOf(node.callee), HeightOf(node.arguments));
  }
  int operator()(const BuiltinCall& node) const {
    return std::max(HeightOf(node.input), HeightOf(node.arguments));
  }
};

struct OperatorName {
  std::string_view text;
  BinaryOp op;
};
constexpr std::array kSums = {OperatorName{"+", BinaryOp::kAdd},
                              OperatorName{"-", BinaryOp::kSubtract}};
constexpr std::array kProducts = {
    OperatorName{"*", BinaryOp::kMultiply}, OperatorName{"/", BinaryOp::kDivide},
    OperatorName{"//", BinaryOp::kFloorDivide}, OperatorName{"%", BinaryOp::kModulo}};
constexpr std::array kPowers = {OperatorName{"**", BinaryOp::kPower}};

template <typename Table>
const OperatorName* FindOperator(const Table& table, const Token& token) {
  for (const OperatorName& entry : table) {
    if (token.IsOperator(entry.text)) return &entry;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<ExprPtr> Parser::New(int line, Expr::Node node) const {
  const int height = std::visit(ChildHeight(), node) + 1;
  if (height > kMaxHeight) return Fail(line, "an expression is too long or nested too deeply");
  return std::make_unique<const Expr>(Expr{line, height, std::move(node)});
}

bool Parser::AtTupleEnd() const {
  return Current().kind == Token::Kind::kVariableEnd || Current().kind == Token::Kind::kBlockEnd ||
         Current().IsOperator(")");
}

absl::StatusOr<ExprPtr> Parser::ParseTuple(bool with_conditional) {
  const int line = Current().line;
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  do {
    if (is_tuple && AtTupleEnd()) break;
    JINJA_ASSIGN(ExprPtr item, with_conditional ? ParseExpression() : ParseOr());
    items.push_back(std::move(item));
    is_tuple = is_tuple || Current().IsOperator(",");
  } while (SkipOperator(","));
  if (!is_tuple) return std::move(items[0]);
  return New(line, ListDisplay{std::move(items), Sequence::Kind::kTuple});
}

absl::StatusOr<ExprPtr> Parser::ParseExpression() {
  const Nesting nesting(*this);
  JINJA_CHECK(nesting.Check());
  int line = Current().line;
  JINJA_ASSIGN(ExprPtr expr, ParseOr());
  while (SkipName("if")) {
    Conditional node;
    node.then = std::move(expr);
    JINJA_ASSIGN(node.condition, ParseOr());
    if (SkipName("else")) {
      JINJA_ASSIGN(node.otherwise, ParseExpression());
    }
    JINJA_ASSIGN(expr, New(line, std::move(node)));
    line = Current().line;
  }
  return expr;
}

absl::StatusOr<ExprPtr> Parser::ParseOr() {
  JINJA_ASSIGN(ExprPtr left, ParseAnd());
  while (Current().IsName("or")) {
    const int line = Take().line;
    JINJA_ASSIGN(ExprPtr right, ParseAnd());
    JINJA_ASSIGN(left, New(line, Logical{false, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExprPtr> Parser::ParseAnd() {
  JINJA_ASSIGN(ExprPtr left, ParseNot());
  while (Current().IsName("and")) {
    const int line = Take().line;
    JINJA_ASSIGN(ExprPtr right, ParseNot());
    JINJA_ASSIGN(left, New(line, Logical{true, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExprPtr> Parser::ParseNot() {
  if (!Current().IsName("not")) return ParseComparison();
  const Nesting nesting(*this);
  JINJA_CHECK(nesting.Check());
  const int line = Take().line;
  JINJA_ASSIGN(ExprPtr operand, ParseNot());
  return New(line, Unary{Unary::Op::kNot, std::move(operand)});
}

absl::StatusOr<ExprPtr> Parser::ParseComparison() {
  static constexpr std::array<std::pair<std::string_view, CompareOp>, 6> kOperators = {
      {{"==", CompareOp::kEqual},
       {"!=", CompareOp::kNotEqual},
       {"<", CompareOp::kLess},
       {"<=", CompareOp::kLessEqual},
       {">", CompareOp::kGreater},
       {">=", CompareOp::kGreaterEqual}}};
  const int line = Current().line;
  Comparison node;
  JINJA_ASSIGN(node.first, ParseSum());
  while (true) {
    const auto* const op =
        std::find_if(kOperators.begin(), kOperators.end(),
                     [&](const auto& entry) { return Current().IsOperator(entry.first); });
    CompareOp chosen = CompareOp::kIn;
    if (op != kOperators.end()) {
      chosen = op->second;
    } else if (Current().IsName("not") && Ahead().IsName("in")) {
      chosen = CompareOp::kNotIn;
      Take();
    } else if (!Current().IsName("in")) {
      break;
    }
    Take();
    JINJA_ASSIGN(ExprPtr operand, ParseSum());
    node.rest.emplace_back(chosen, std::move(operand));
  }
  if (node.rest.empty()) return std::move(node.first);
  return New(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseSum() {
  JINJA_ASSIGN(ExprPtr left, ParseConcat());
  while (const OperatorName* op = FindOperator(kSums, Current())) {
    const int line = Take().line;
    JINJA_ASSIGN(ExprPtr right, ParseConcat());
    JINJA_ASSIGN(left, New(line, Binary{op->op, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExprPtr> Parser::ParseConcat() {
  const int line = Current().line;
  JINJA_ASSIGN(ExprPtr first, ParseProduct());
  if (!Current().IsOperator("~")) return first;
  Concat node;
  node.parts.push_back(std::move(first));
  while (SkipOperator("~")) {
    JINJA_ASSIGN(ExprPtr part, ParseProduct());
    node.parts.push_back(std::move(part));
  }
  return New(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseProduct() {
  JINJA_ASSIGN(ExprPtr left, ParsePower());
  while (const OperatorName* op = FindOperator(kProducts, Current())) {
    const int line = Take().line;
    JINJA_ASSIGN(ExprPtr right, ParsePower());
    JINJA_ASSIGN(left, New(line, Binary{op->op, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExprPtr> Parser::ParsePower() {
  JINJA_ASSIGN(ExprPtr left, ParseUnary(/*with_filters=*/true));
  while (const OperatorName* op = FindOperator(kPowers, Current())) {
    const int line = Take().line;
    JINJA_ASSIGN(ExprPtr right, ParseUnary(/*with_filters=*/true));
    JINJA_ASSIGN(left, New(line, Binary{op->op, std::move(left), std::move(right)}));
  }
  return left;
}

absl::StatusOr<ExprPtr> Parser::ParseUnary(bool with_filters) {
  const Nesting nesting(*this);
  JINJA_CHECK(nesting.Check());
  ExprPtr expr;
  if (Current().IsOperator("-") || Current().IsOperator("+")) {
    const Token sign = Take();
    JINJA_ASSIGN(ExprPtr operand, ParseUnary(/*with_filters=*/false));
    const Unary::Op op = sign.text == "-" ? Unary::Op::kMinus : Unary::Op::kPlus;
    JINJA_ASSIGN(expr, New(sign.line, Unary{op, std::move(operand)}));
  } else {
    JINJA_ASSIGN(expr, ParsePrimary());
  }
  JINJA_ASSIGN(expr, ParsePostfix(std::move(expr)));
  if (!with_filters) return expr;
  return ParseFiltersAndTests(std::move(expr));
}

absl::StatusOr<ExprPtr> Parser::ParsePostfix(ExprPtr object) {
  while (true) {
    if (Current().IsOperator(".")) {
      JINJA_ASSIGN(object, ParseAttribute(std::move(object)));
    } else if (Current().IsOperator("[")) {
      JINJA_ASSIGN(object, ParseSubscript(std::move(object)));
    } else if (Current().IsOperator("(")) {
      const int line = Current().line;
      JINJA_ASSIGN(CallArguments arguments, ParseArguments());
      JINJA_ASSIGN(object, New(line, Call{std::move(object), std::move(arguments)}));
    } else {
      return object;
    }
  }
}

absl::StatusOr<ExprPtr> Parser::ParseFiltersAndTests(ExprPtr input) {
  while (true) {
    if (SkipOperator("|")) {
      JINJA_ASSIGN(input, ParseFilter(std::move(input)));
    } else if (SkipName("is")) {
      JINJA_ASSIGN(input, ParseTest(std::move(input)));
    } else if (Current().IsOperator("(")) {
      const int line = Current().line;
      JINJA_ASSIGN(CallArguments arguments, ParseArguments());
      JINJA_ASSIGN(input, New(line, Call{std::move(input), std::move(arguments)}));
    } else {
      return input;
    }
  }
}

absl::StatusOr<ExprPtr> Parser::ParseFilter(ExprPtr input) {
  const int line = Current().line;
  JINJA_ASSIGN(const std::string name, ExpectName());
  BuiltinCall node;
  node.input = std::move(input);
  node.function = FindFilter(name);
  if (node.function == nullptr) {
    return Fail(line, Cat("no filter named ", ReprText(name)));
  }
  if (Current().IsOperator("(")) {
    JINJA_ASSIGN(node.arguments, ParseArguments());
  }
  return New(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseTest(ExprPtr input) {
  const int line = Current().line;
  const bool negated = SkipName("not");
  JINJA_ASSIGN(const std::string name, ExpectName());
  BuiltinCall node;
  node.input = std::move(input);
  node.function = FindTest(name);
  if (node.function == nullptr) return Fail(line, Cat("no test named ", ReprText(name)));
  const Token& next = Current();
  const bool starts_operand = next.kind == Token::Kind::kString ||
                              next.kind == Token::Kind::kInteger ||
                              next.kind == Token::Kind::kFloat || next.IsOperator("[") ||
                              next.IsOperator("{") || next.kind == Token::Kind::kName;
  if (next.IsOperator("(")) {
    JINJA_ASSIGN(node.arguments, ParseArguments());
  } else if (starts_operand && !next.IsName("else") && !next.IsName("or") && !next.IsName("and")) {
    if (next.IsName("is")) return Fail(line, "tests cannot be chained with 'is'");
    JINJA_ASSIGN(ExprPtr operand, ParsePrimary());
    JINJA_ASSIGN(operand, ParsePostfix(std::move(operand)));
    node.arguments.positional.push_back(std::move(operand));
  }
  JINJA_ASSIGN(ExprPtr test, New(line, std::move(node)));
  if (!negated) return test;
  return New(line, Unary{Unary::Op::kNot, std::move(test)});
}

}  // namespace qwend::jinja
