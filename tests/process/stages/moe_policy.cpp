// Reads events from standard input, line by line, and prints what the engine's policy decides.
//   init RULE GUARDED SLOTS EXPERTS LAYERS TOP_K EXPERT_MB RATES*7
//   d LAYER IS_PROMPT EXPERTS*TOP_K   decide: prints gpu, fetch, cpu, uploads and the predicted time
//   o LAYER | l LAYER EXPERT   observe, landed
//   b LAYER TOKENS COUNTS*EXPERTS   begin: prints the experts of the slots
//   time LAYERS TOKENS   prints microseconds of this thread for a decide, its copies' ends and observe
#include "llama-moe-policy.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <random>
#include <sstream>

static void print(const std::vector<int> & list) {
    for (size_t i = 0; i < list.size(); i++) {
        printf(i ? ",%d" : "%d", list[i]);
    }
    printf("|");
}

int main() {
    const llama_moe_policy & policy = llama_moe_policy_get();
    void * self = nullptr;
    llama_moe_setup setup;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        std::string word;
        int layer = 0;
        in >> word;
        if (word == "init") {
            std::string rule;
            int layers;
            llama_moe_layer_shape shape;
            llama_moe_rates & r = setup.rates;
            in >> rule >> setup.is_guarded >> setup.slots >> setup.experts >> layers >> shape.top_k >> shape.expert_mb;
            for (double * each : { &r.cpu_gb_s, &r.pcie_gb_s, &r.dram_gb_s, &r.other_ms, &r.cpu_fixed_ms, &r.gpu_expert_ms,
                                   &r.gpu_fixed_ms }) {
                in >> word;
                *each = strtod(word.c_str(), nullptr);
            }
            for (int each = 0; each <= LLAMA_MOE_RULE_OFFLOAD; each++) {
                if (rule == LLAMA_MOE_RULE_NAMES[each]) {
                    setup.rule = (llama_moe_rule) each;
                }
            }
            setup.layers.assign(layers, shape);
            setup.on_takeover = [](const std::string & words) { printf("%s\n", words.c_str()); };
            if (self) {
                policy.free(self);
            }
            std::string error;
            self = policy.init(setup, error);
            if (!error.empty()) {
                printf("%s: %s\n", self ? "warning" : "error", error.c_str());
            }
            continue;
        }
        in >> layer;
        if (word == "d") {
            std::vector<int32_t> used(setup.layers[layer].top_k);
            bool is_prompt;
            in >> is_prompt;
            for (auto & each : used) {
                in >> each;
            }
            const llama_moe_decision & found = policy.decide(self, layer, used.data(), is_prompt);
            print(found.gpu);
            print(found.fetch);
            print(found.cpu);
            for (const auto & each : found.uploads) {
                printf("%d:%d:%d:%d,", each.expert, each.victim, each.slot, each.is_fetch);
            }
            printf("|%.17g\n", found.ms);
        } else if (word == "o") {
            policy.observe(self, layer);
        } else if (word == "b") {
            long tokens;
            std::vector<int64_t> counts(setup.experts);
            in >> tokens;
            for (auto & each : counts) {
                in >> each;
            }
            print(policy.begin(self, layer, tokens, counts));
            printf("\n");
        } else if (word == "time") {
            int tokens;
            in >> tokens;
            std::mt19937 draw(1);
            std::vector<int32_t> used(setup.experts);
            double us = 0.0;
            for (int token = 0; token < tokens; token++) {
                for (int each = 0; each < layer; each++) {
                    for (int i = 0; i < setup.experts; i++) {
                        used[i] = i;
                    }
                    for (int i = 0; i < setup.layers[0].top_k; i++) {
                        std::swap(used[i], used[i + draw() % (1 + (setup.experts - i - 1) / (1 + draw() % 8))]);
                    }
                    timespec start, end;
                    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
                    const auto & found = policy.decide(self, each, used.data(), false);
                    for (const auto & upload : std::vector<llama_moe_upload>(found.uploads)) {
                        policy.landed(self, each, upload.expert);
                    }
                    policy.observe(self, each);
                    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
                    us += (end.tv_sec - start.tv_sec) * 1e6 + (end.tv_nsec - start.tv_nsec) * 1e-3;
                }
            }
            printf("%.3f\n", us / tokens / layer);
        } else {
            int expert;
            in >> expert;
            policy.landed(self, layer, expert);
        }
    }
    if (self) {
        policy.free(self);
    }
    return 0;
}
