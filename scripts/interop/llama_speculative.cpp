// Decodes prompts with llama.cpp, plainly and with a drafter through its common/speculative.h, on the CPU, greedy.
//
//   llama_speculative TARGET.gguf DRAFTER.gguf PROMPTS.json WALKS.json OUT.json MAX_NEW THREADS
//
// PROMPTS.json is what `dflash-export logits` writes, WALKS.json what `dflash-export walk` does. OUT.json gets, for each
// prompt, both texts and every round, counted as dflash-eval counts: K drafted, a accepted, cut when the budget narrowed the
// round or a stop token ended it. It gets, too, how many of the recorded blocks llama.cpp drafts alike, whether it tokenises
// the rendered prompts alike, and how far its logits are from the recorded ones.
// Everything that llama.cpp would keep in half precision by default is kept in single precision here.

#include "common.h"
#include "llama.h"
#include "log.h"
#include "speculative.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

using json = nlohmann::json;

static void fail(const std::string & what) {
    std::fprintf(stderr, "llama_speculative: %s\n", what.c_str());
    std::exit(2);
}

static void errors_only(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

// The first of the largest, as in dflash-eval.
static llama_token argmax(const float * logits, int n_vocab) {
    return (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
}

struct Setting {
    int              max_new;
    int              n_draft;
    llama_tokens     stops;

    bool stop(llama_token token) const { return std::find(stops.begin(), stops.end(), token) != stops.end(); }
};

static void decode(llama_context * ctx, common_batch & batch) {
    if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
        fail("a pass of the target failed");
    }
}

// Starts a text anew: the prompt through the target, the first token chosen. The batch is left for the drafter to see.
static llama_token begin(llama_context * ctx, common_batch & batch, const llama_tokens & prompt, int n_vocab) {
    llama_memory_clear(llama_get_memory(ctx), true);
    batch.clear();
    for (size_t i = 0; i < prompt.size(); i++) {
        batch.add(prompt[i], (llama_pos) i, 0, i + 1 == prompt.size());
    }
    decode(ctx, batch);
    return argmax(llama_get_logits_ith(ctx, (int32_t) prompt.size() - 1), n_vocab);
}

static llama_tokens plain(llama_context * ctx, const llama_tokens & prompt, const Setting & setting, int n_vocab) {
    common_batch batch(ctx);
    llama_tokens text = { begin(ctx, batch, prompt, n_vocab) };
    while ((int) text.size() < setting.max_new && !setting.stop(text.back())) {
        batch.clear();
        batch.add(text.back(), (llama_pos) (prompt.size() + text.size() - 1), 0, true);
        decode(ctx, batch);
        text.push_back(argmax(llama_get_logits_ith(ctx, 0), n_vocab));
    }
    return text;
}

// Drafts after `known`, which target and drafter have seen, and `anchor`, which they have not.
static llama_tokens propose(common_speculative * spec, llama_context * ctx_draft, const llama_tokens & known,
        llama_token anchor, int asked) {
    llama_tokens drafts;
    auto & wanted = common_speculative_get_draft_params(spec, 0);
    wanted.drafting = true;
    wanted.n_max    = asked;
    wanted.pos0     = (llama_pos) known.size();
    wanted.id_last  = anchor;
    wanted.prompt   = &known;
    wanted.result   = &drafts;
    common_speculative_draft(spec);
    // the block itself is no context
    llama_memory_seq_rm(llama_get_memory(ctx_draft), 0, (llama_pos) known.size(), -1);
    if ((int) drafts.size() != asked) {
        fail("asked for " + std::to_string(asked) + " drafts, got " + std::to_string(drafts.size()));
    }
    return drafts;
}

// How many of the recorded blocks are drafted alike.
static size_t equal_blocks(llama_context * ctx, llama_context * ctx_draft, common_speculative * spec, const json & walks,
        int n_draft, int n_vocab) {
    size_t equal = 0;
    for (const auto & walk : walks) {
        const auto tokens = walk.at("tokens").get<llama_tokens>();
        llama_memory_clear(llama_get_memory(ctx_draft), true);
        common_batch batch(ctx);
        begin(ctx, batch, tokens, n_vocab);
        if (!common_speculative_process(spec, batch)) {
            fail("the drafter did not take a context");
        }
        common_speculative_begin(spec, 0, tokens);
        const auto drafts = propose(spec, ctx_draft, tokens, walk.at("anchor").get<llama_token>(), n_draft);
        equal += drafts == walk.at("walk").get<llama_tokens>();
    }
    return equal;
}

static json speculate(llama_context * ctx, llama_context * ctx_draft, common_speculative * spec,
        const llama_tokens & prompt, const Setting & setting, int n_vocab) {
    auto * memory       = llama_get_memory(ctx);
    auto * memory_draft = llama_get_memory(ctx_draft);
    llama_memory_clear(memory_draft, true);
    common_batch batch(ctx);
    llama_tokens text = { begin(ctx, batch, prompt, n_vocab) };
    if (!common_speculative_process(spec, batch)) {
        fail("the drafter did not take the prompt");
    }
    common_speculative_begin(spec, 0, prompt);
    json rounds = json::array();
    llama_tokens known = prompt; // all tokens that the target has seen
    while ((int) text.size() < setting.max_new && !setting.stop(text.back())) {
        const llama_pos   at     = (llama_pos) known.size();
        const llama_token anchor = text.back();
        const int         asked  = std::min(setting.n_draft, setting.max_new - (int) text.size() - 1);
        llama_tokens      drafts;
        if (asked > 0) {
            drafts = propose(spec, ctx_draft, known, anchor, asked);
        }
        batch.clear();
        batch.add(anchor, at, 0, true);
        for (size_t i = 0; i < drafts.size(); i++) {
            batch.add(drafts[i], at + 1 + (llama_pos) i, 0, true);
        }
        decode(ctx, batch);
        if (!common_speculative_process(spec, batch)) {
            fail("the drafter did not take a verified block");
        }
        size_t accepted = 0, emitted = 0;
        for (size_t row = 0; row <= drafts.size(); row++) {
            const llama_token choice = argmax(llama_get_logits_ith(ctx, (int32_t) row), n_vocab);
            const bool stands = row < drafts.size() && drafts[row] == choice;
            text.push_back(choice);
            emitted++;
            accepted += stands;
            if (!stands || setting.stop(choice) || (int) text.size() == setting.max_new) {
                break;
            }
        }
        if (!drafts.empty()) {
            common_speculative_accept(spec, 0, (uint16_t) accepted);
        }
        known.push_back(anchor);
        known.insert(known.end(), text.end() - (ptrdiff_t) emitted, text.end() - 1);
        if (emitted <= drafts.size()) {
            // what was verified in vain; both keep what stands
            if (!llama_memory_seq_rm(memory, 0, at + (llama_pos) emitted, -1)) {
                fail("the target could not be taken back");
            }
            llama_memory_seq_rm(memory_draft, 0, at + (llama_pos) emitted, -1);
        }
        const bool cut = asked < setting.n_draft || emitted == accepted;
        rounds.push_back({ { "drafted", drafts.size() }, { "accepted", accepted }, { "truncated", cut } });
    }
    return { { "tokens", text }, { "rounds", rounds } };
}

// The target's logits after every token of the first prompt, beside the recorded ones.
static json compare_logits(llama_context * ctx, const llama_tokens & prompt, const json & recorded, int n_vocab) {
    llama_memory_clear(llama_get_memory(ctx), true);
    common_batch batch(ctx);
    for (size_t i = 0; i < prompt.size(); i++) {
        batch.add(prompt[i], (llama_pos) i, 0, true);
    }
    decode(ctx, batch);
    double farthest = 0, largest = 0;
    size_t agree = 0;
    for (size_t row = 0; row < prompt.size(); row++) {
        const auto    ours   = recorded.at(row).get<std::vector<float>>();
        const float * theirs = llama_get_logits_ith(ctx, (int32_t) row);
        if ((int) ours.size() != n_vocab) {
            fail("the recorded logits have " + std::to_string(ours.size()) + " columns, the model " + std::to_string(n_vocab));
        }
        for (int i = 0; i < n_vocab; i++) {
            const double off = std::fabs((double) ours[i] - theirs[i]);
            // a NaN is as far as can be
            farthest = off <= farthest ? farthest : off;
            largest  = std::max(largest, std::fabs((double) ours[i]));
        }
        agree += argmax(ours.data(), n_vocab) == argmax(theirs, n_vocab);
    }
    return { { "rows", prompt.size() }, { "argmax_equal", agree }, { "max_abs_difference", farthest }, { "max_abs", largest } };
}

int main(int argc, char ** argv) {
    if (argc != 8) {
        fail("expected TARGET.gguf DRAFTER.gguf PROMPTS.json WALKS.json OUT.json MAX_NEW THREADS");
    }
    llama_log_set(errors_only, nullptr);
    common_log_set_verbosity_thold(-1);
    llama_backend_init();

    common_params params;
    params.model.path      = argv[1];
    params.n_gpu_layers    = 0;
    params.no_extra_bufts  = true; // weights stay as stored
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.cache_type_k    = GGML_TYPE_F32;
    params.cache_type_v    = GGML_TYPE_F32;
    params.n_ctx           = 1024;
    params.n_batch         = 1024;
    params.n_ubatch        = 1024;
    params.n_parallel      = 1;
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = std::atoi(argv[7]);

    auto & draft       = params.speculative.draft;
    draft.mparams.path = argv[2];
    draft.cache_type_k = GGML_TYPE_F32;
    draft.cache_type_v = GGML_TYPE_F32;

    llama_model_ptr model(llama_model_load_from_file(argv[1], common_model_params_to_llama(params)));
    if (!model) {
        fail(std::string("the target was refused: ") + argv[1]);
    }
    auto types = common_speculative_types_from_gguf(argv[2]);
    if (types.size() != 1 || types[0] != COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) {
        fail(std::string("not taken for a DFlash drafter: ") + argv[2]);
    }
    params.speculative.types = types;
    // clamped to the drafter's block by llama.cpp itself, and read back below
    draft.n_max = 64;

    auto in_params = common_context_params_to_llama(params);
    in_params.n_rs_seq = 0;
    llama_context_ptr ctx_plain(llama_init_from_model(model.get(), in_params));
    llama_context_ptr ctx(llama_init_from_model(model.get(), common_context_params_to_llama(params)));
    if (!ctx_plain || !ctx) {
        fail("no context for the target");
    }
    auto params_draft = common_base_params_to_speculative(params);
    auto drafter      = common_speculative_init_from_params(params_draft, model.get(), ctx.get());
    if (!drafter->model() || !drafter->context()) {
        fail(std::string("the drafter was refused: ") + argv[2]);
    }
    draft.ctx_tgt = ctx.get();
    draft.ctx_dft = drafter->context();
    common_speculative_ptr spec(common_speculative_init(params.speculative, 1));
    if (!spec) {
        fail("no speculative decoding with this drafter");
    }

    json prompts, walks;
    std::ifstream(argv[3]) >> prompts;
    std::ifstream(argv[4]) >> walks;
    const auto * vocab   = llama_model_get_vocab(model.get());
    const int    n_vocab = llama_vocab_n_tokens(vocab);

    Setting setting { std::atoi(argv[6]), common_speculative_n_max(spec.get()), prompts.at("stop_ids").get<llama_tokens>() };
    json out = { { "max_new", setting.max_new }, { "n_draft", setting.n_draft }, { "prompts", json::array() } };
    for (const auto & entry : prompts.at("contexts")) {
        const auto prompt = entry.at("tokens").get<llama_tokens>();
        const auto ids    = common_tokenize(vocab, entry.at("text").get<std::string>(), false, true);
        json result = speculate(ctx.get(), drafter->context(), spec.get(), prompt, setting, n_vocab);
        result["tokenised_alike"] = ids == prompt;
        result["plain"]           = plain(ctx_plain.get(), prompt, setting, n_vocab);
        out["prompts"].push_back(result);
    }
    out["blocks"]       = walks.at("contexts").size();
    out["blocks_equal"] = equal_blocks(ctx.get(), drafter->context(), spec.get(), walks.at("contexts"), setting.n_draft, n_vocab);
    const auto first = prompts.at("contexts").at(0).at("tokens").get<llama_tokens>();
    out["logits"] = compare_logits(ctx_plain.get(), first, prompts.at("logits"), n_vocab);
    std::ofstream file(argv[5]);
    file << out.dump(1) << "\n";
    if (!file.flush()) {
        fail(std::string("cannot write ") + argv[5]);
    }
    return 0;
}
