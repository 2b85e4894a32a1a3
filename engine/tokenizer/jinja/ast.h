// A parsed template. Never changes after parsing; any number of renderings may read it at once.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/tokenizer/jinja/arguments.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct CallArguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr splat;        // *args, or null
  ExprPtr named_splat;  // **kwargs, or null
};

struct Literal {
  Value value;
};
struct Name {
  std::string name;
};
struct Captured {};  // the text that a `filter` or block `set` has gathered
struct ListDisplay {
  std::vector<ExprPtr> items;
  Sequence::Kind kind = Sequence::Kind::kList;  // or kTuple
};
struct DictDisplay {
  std::vector<std::pair<ExprPtr, ExprPtr>> entries;
};
struct Unary {
  enum class Op { kNot, kMinus, kPlus } op;
  ExprPtr operand;
};
struct Binary {
  BinaryOp op;
  ExprPtr left;
  ExprPtr right;
};
struct Logical {
  bool is_and;
  ExprPtr left;
  ExprPtr right;
};
struct Comparison {
  ExprPtr first;
  std::vector<std::pair<CompareOp, ExprPtr>> rest;  // a < b < c compares neighbours
};
struct Concat {
  std::vector<ExprPtr> parts;  // joined by ~
};
struct Conditional {
  ExprPtr condition;
  ExprPtr then;
  ExprPtr otherwise;  // null: undefined
};
struct Attribute {
  ExprPtr object;
  std::string name;
};
struct Item {
  ExprPtr object;
  ExprPtr key;
};
struct SliceItem {
  ExprPtr object;
  ExprPtr start, stop, step;  // null when not given
};
struct Call {
  ExprPtr callee;
  CallArguments arguments;
};
struct BuiltinCall {  // a filter or a test
  ExprPtr input;
  Builtin function;
  CallArguments arguments;
};

struct Expr {
  using Node =
      std::variant<Literal, Name, Captured, ListDisplay, DictDisplay, Unary, Binary, Logical,
                   Comparison, Concat, Conditional, Attribute, Item, SliceItem, Call, BuiltinCall>;
  int line = 1;
  int height = 1;  // levels of expressions below and with this one
  Node node;
};

// What a value is assigned to.
struct Target {
  int line = 1;
  std::string name;       // empty: unpacks into `elements`
  std::string attribute;  // not empty: name.attribute of a namespace
  std::vector<Target> elements;
};

struct Statement;
using Body = std::vector<std::unique_ptr<const Statement>>;

struct Data {
  std::string text;
};
struct Output {
  ExprPtr value;
};
struct If {
  std::vector<std::pair<ExprPtr, Body>> branches;
  Body otherwise;
};
struct For {
  Target target;
  ExprPtr iterable;
  ExprPtr condition;  // null: takes every item
  Body body;
  Body otherwise;
};
struct Set {
  Target target;
  ExprPtr value;
};
struct SetBlock {
  Target target;
  ExprPtr value;  // over Captured
  Body body;
};
struct FilterBlock {
  ExprPtr value;  // over Captured
  Body body;
};
struct MacroDefinition {
  struct Parameter {
    std::string name;
    ExprPtr otherwise;  // null: none
  };
  std::string name;
  std::vector<Parameter> parameters;
  // The body reads these special variables, so the macro takes what they hold.
  bool reads_varargs = false;
  bool reads_kwargs = false;
  bool reads_caller = false;
  Body body;
};
struct CallBlock {
  ExprPtr call;  // a Call
  MacroDefinition caller;
};
struct With {  // also `generation`, which has no bindings
  std::vector<std::pair<Target, ExprPtr>> bindings;
  Body body;
};
struct Jump {
  bool is_break;
};

struct Statement {
  int line = 1;
  std::variant<Data, Output, If, For, Set, SetBlock, FilterBlock, MacroDefinition, CallBlock, With,
               Jump>
      node;
};

}  // namespace qwend::jinja
